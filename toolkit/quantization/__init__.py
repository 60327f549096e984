"""Weights in fewer bits than the activations: which kinds there are, and which the model being built takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from toolkit.quantization import fp8

_building: ContextVar[str | None] = ContextVar("quantization", default=None)


def require(method: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError when a model of activations in `dtype` cannot be quantized so on this device."""
    if method == "fp8":
        fp8.require(device, dtype)


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
    if _building.get() is None:
        return torch.empty(rows, columns), None
    return torch.empty(rows, columns, dtype=fp8.DTYPE), torch.empty(rows, dtype=torch.float32)
