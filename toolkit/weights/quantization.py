"""Weight quantization: the methods, and the one used by the model that is being built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from toolkit.kernels.switch import kernels_are_off
from toolkit.weights.fp8 import FP8Weight
from toolkit.weights.int8 import Int8Weight
from toolkit.weights.plain import plain_weight
from toolkit.weights.row_scaled import RowScaledWeight
from toolkit.weights.weight import Weight

METHODS: dict[str, type[RowScaledWeight]] = {"fp8": FP8Weight, "int8": Int8Weight}
_building: ContextVar[str | None] = ContextVar("quantization", default=None)


def require(method: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the device and activations in `dtype` do not support the method.

    PyTorch alone supports every method everywhere."""
    if method is not None and not kernels_are_off():
        METHODS[method].require(device, dtype)


@contextmanager
def quantized(method: str | None) -> Iterator[None]:
    """Build linear layers inside with weights of this kind. None: of the default dtype."""
    token = _building.set(method)
    try:
        yield
    finally:
        _building.reset(token)


def new_weight(rows: int, columns: int) -> Weight:
    """Return an uninitialized weight for a linear layer."""
    method = _building.get()
    return plain_weight(rows, columns) if method is None else METHODS[method](rows, columns)


def new_head_weight(rows: int, columns: int) -> Weight:
    """Return an uninitialized weight for an output head, which an embedding may share."""
    return new_weight(rows, columns) if quantizes_head() else plain_weight(rows, columns)


def is_quantized() -> bool:
    """Return whether the linear layers of the model being built are quantized."""
    return _building.get() is not None


def quantizes_head() -> bool:
    """Return whether the output head of the model being built is quantized too.

    On a CPU it is: small models spend a third of their time there. On GPUs the head keeps the
    checkpoint's precision, which matters most there."""
    return _building.get() == "int8"
