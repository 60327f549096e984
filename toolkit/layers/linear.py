"""Matrix products with weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.layers.weights import Slot, Slots


class Linear(nn.Module):
    """y = x Wᵀ + b, W: [out, in]."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def slots(self, name: str, *, transpose: bool = False) -> Slots:
        """The layer's tensors under the checkpoint's name for it."""
        return _slots(name, self.weight, self.bias, transpose=transpose)


class MergedLinear(Linear):
    """Several projections of one input, done as one product; the outputs lie side by side."""

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool) -> None:
        super().__init__(in_features, sum(out_features), bias=bias)
        self.out_features = tuple(out_features)

    def merged_slots(self, names: Sequence[str]) -> Slots:
        """The tensors of the projections that the checkpoint keeps apart, in order."""
        slots: Slots = {}
        start = 0
        for name, size in zip(names, self.out_features, strict=True):
            part = slice(start, start + size)
            slots |= _slots(name, self.weight[part], self.bias[part] if self.bias is not None else None)
            start += size
        return slots


def _slots(name: str, weight: torch.Tensor, bias: torch.Tensor | None, *, transpose: bool = False) -> Slots:
    slots = {f"{name}.weight": Slot(weight, transpose)}
    if bias is not None:
        slots[f"{name}.bias"] = Slot(bias)
    return slots
