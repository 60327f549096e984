"""Embedding tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import Share, current, rounded_up
from toolkit.layers.fused import fused
from toolkit.weights.packed import Packed
from toolkit.weights.slots import Slot, Slots

ALIGNMENT = 64
"""On a GPU a table's number of rows is rounded up to a multiple of this."""


class Embedding(nn.Module):
    """Rows of a table [size, hidden], by index. `table` may have rows of padding after them (see OutputHead)."""

    packed: Packed | None = None
    """What has the rows in the table's place."""

    def __init__(self, size: int, hidden: int) -> None:
        super().__init__()
        self.size = size
        self.table = nn.Parameter(padded_table(size, hidden), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """[size, hidden]"""
        return self.table[: self.size]

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            return self.packed.rows(indices, self.table.dtype)
        return F.embedding(indices, self.table)

    def share(self, packed: Packed) -> None:
        """Takes rows from the weight of a product, packed from this table, so that they are in memory once."""
        if packed.has_rows:
            self.packed = packed
            self.table = nn.Parameter(torch.empty(0, dtype=self.table.dtype), requires_grad=False)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}


class VocabularyEmbedding(Embedding):
    """Token embeddings. Each rank has a share of the rows, and gives zeros for the others' tokens."""

    def __init__(self, size: int, hidden: int) -> None:
        nn.Module.__init__(self)
        self.group = current()
        self.part = vocabulary_share(size)
        self.size = self.part.count
        self.table = nn.Parameter(vocabulary_table(size, hidden), requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return super().forward(indices)
        kernels = fused(indices.device)
        if kernels is not None:
            rows = kernels.embed_share(indices, self.table, self.part.begin, self.part.count)
        else:
            own = indices - self.part.begin
            here = (own >= 0) & (own < self.part.count)
            rows = super().forward(own.where(here, 0)) * here[:, None]
        return self.group.all_reduce(rows)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight, shares=(self.part,))}


def vocabulary_share(size: int) -> Share:
    """This rank's tokens."""
    return rounded_up(size, _alignment())


def vocabulary_table(size: int, hidden: int) -> torch.Tensor:
    """Rows for this rank's tokens, not filled; as many as every other rank has. Those past the last token are zero."""
    part = vocabulary_share(size)
    table = padded_table(part.largest, hidden)
    if not part.whole:
        table[part.count :].zero_()
    return table


def _alignment() -> int:
    return ALIGNMENT if torch.get_default_device().type == "cuda" else 1


def padded_table(size: int, hidden: int) -> torch.Tensor:
    """A table for `size` rows, not filled; with padding on a GPU."""
    alignment = _alignment()
    return torch.empty(-(-size // alignment) * alignment, hidden)
