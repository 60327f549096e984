"""Embedding tables."""

import torch
import torch.nn.functional as F
from torch import nn

from toolkit.distributed import Shard, aligned_shard, current_group
from toolkit.kernels.table import kernels_for
from toolkit.weights.packed import Packed
from toolkit.weights.slots import Slot, Slots

ALIGNMENT = 64  # on a GPU a table's number of rows is a multiple of this


class Embedding(nn.Module):
    """A table [size, hidden], looked up by row. `table` may end with padding (see OutputHead)."""

    packed: Packed | None = None  # holds the rows in place of `table`

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

    def use_packed(self, packed: Packed) -> None:
        """Look rows up in a head's weight that was packed from this table, and free the table."""
        if packed.has_rows:
            self.packed = packed
            self.table = nn.Parameter(torch.empty(0, dtype=self.table.dtype), requires_grad=False)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight)}


class VocabularyEmbedding(Embedding):
    """Token embeddings. Each rank has a shard of the rows, and zeros for the others' tokens."""

    def __init__(self, size: int, hidden: int) -> None:
        nn.Module.__init__(self)
        self.group = current_group()
        self.shard = vocabulary_shard(size)
        self.size = self.shard.count
        self.table = nn.Parameter(vocabulary_table(size, hidden), requires_grad=False)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return super().forward(indices)
        kernels = kernels_for(indices.device)
        if kernels is not None:
            rows = kernels.embed_shard(indices, self.table, self.shard.begin, self.shard.count)
        else:
            own = indices - self.shard.begin
            is_own = (own >= 0) & (own < self.shard.count)
            rows = super().forward(own.where(is_own, 0)) * is_own[:, None]
        return self.group.all_reduce(rows)

    def slots(self, name: str) -> Slots:
        return {f"{name}.weight": Slot(self.weight, shards=(self.shard,))}


def vocabulary_shard(size: int) -> Shard:
    """Return this rank's tokens."""
    return aligned_shard(size, _alignment())


def vocabulary_table(size: int, hidden: int) -> torch.Tensor:
    """Return an empty table for this rank's tokens, with as many rows as the other ranks have.

    Rows past the last token are zero."""
    shard = vocabulary_shard(size)
    table = padded_table(shard.max_count, hidden)
    if not shard.is_full:
        table[shard.count :].zero_()
    return table


def _alignment() -> int:
    return ALIGNMENT if torch.get_default_device().type == "cuda" else 1


def padded_table(size: int, hidden: int) -> torch.Tensor:
    """Return an empty table of `size` rows, padded on a GPU."""
    alignment = _alignment()
    return torch.empty(-(-size // alignment) * alignment, hidden)
