"""Embedding tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.layers.weights import Slot, Slots

ALIGNMENT = 64
"""On a GPU a table's number of rows is rounded up to a multiple of this."""


class Embedding(nn.Module):
    """Rows of a table [size, hidden], by index. `table` may have rows of padding after them (see OutputHead)."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(padded_table(size, hidden), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """[size, hidden]"""
        return self.table[: self.size]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return F.embedding(indices, self.table)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}


def padded_table(size: int, hidden: int) -> torch.Tensor:
    """A table for `size` rows, not filled; with padding on a GPU."""
    if torch.get_default_device().type == "cuda":
        size = -(-size // ALIGNMENT) * ALIGNMENT
    return torch.empty(size, hidden)
