"""Weights in fewer bits than the activations: which kinds there are, and which the model being built takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from toolkit.weights import fp8, int8

METHODS = {"fp8": fp8, "int8": int8}
_building: ContextVar[str | None] = ContextVar("quantization", default=None)


def require(method: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError when a model of activations in `dtype` cannot be quantized so on this device."""
    if method is not None:
        METHODS[method].require(device, dtype)


@contextmanager
def quantized(method: str | None) -> Iterator[None]:
    """Linear layers that are made inside have weights of this kind; None: of the default dtype."""
    token = _building.set(method)
    try:
        yield
    finally:
        _building.reset(token)


def new_weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(a weight, not filled, fp32 scales of its rows or None) for a linear layer, as `quantized` says."""
    method = _building.get()
    if method is None:
        return torch.empty(rows, columns), None
    return torch.empty(rows, columns, dtype=METHODS[method].DTYPE), torch.empty(
        rows, dtype=torch.float32
    )


def quantizes_head() -> bool:
    """Whether the output head of the model being built is to be quantized, too. On a CPU it is, since a small model spends a third
    of its time there; for GPUs the checkpoint's precision is kept where it shows most.
    """
    return _building.get() == "int8"


def quantize(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight in a method's `dtype` [rows, columns], fp32 scales [rows])"""
    rows, scale = int8.quantize(weight) if dtype == int8.DTYPE else fp8.quantize(weight)
    return rows, scale
