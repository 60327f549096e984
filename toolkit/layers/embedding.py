"""Embedding tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.layers.weights import Slot, Slots


class Embedding(nn.Module):
    """Rows of a table [size, hidden], by index."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, hidden), requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.weight)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}
