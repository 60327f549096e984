"""Weight quantization: the methods, and the one used by the model that is being built."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from toolkit.weights import fp8, int8

METHODS = {"fp8": fp8, "int8": int8}
_building: ContextVar[str | None] = ContextVar("quantization", default=None)


def require(method: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the device and activations in `dtype` do not support the method."""
    if method is not None:
        METHODS[method].require(device, dtype)


@contextmanager
def quantized(method: str | None) -> Iterator[None]:
    """Build linear layers inside with weights of this kind. None: of the default dtype."""
    token = _building.set(method)
    try:
        yield
    finally:
        _building.reset(token)


def new_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (uninitialized weight, fp32 row scales or None) for a linear layer."""
    method = _building.get()
    if method is None:
        return torch.empty(rows, columns), None
    return torch.empty(rows, columns, dtype=METHODS[method].DTYPE), torch.empty(
        rows, dtype=torch.float32
    )


def quantizes_head() -> bool:
    """Return whether the output head of the model being built is quantized too.

    On a CPU it is: small models spend a third of their time there. On GPUs the head keeps the
    checkpoint's precision, which matters most there."""
    return _building.get() == "int8"


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (weight [rows, columns] in a method's `dtype`, fp32 scales [rows])."""
    rows, scale = int8.quantize(weight) if dtype == int8.DTYPE else fp8.quantize(weight)
    return rows, scale
