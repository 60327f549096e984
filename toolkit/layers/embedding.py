"""Embedding tables."""

import torch
from torch import nn

from toolkit.distributed import Shard, aligned_shard, current_group, full_shard
from toolkit.weights.formats import Packing
from toolkit.weights.kinds.plain import plain_weight
from toolkit.weights.loading.collected import packed_slots
from toolkit.weights.quantization import find_packing, new_head_weight
from toolkit.weights.slots import Slots
from toolkit.weights.weight import Epilogue, Weight

ALIGNMENT = 64  # on a GPU a table's number of rows is a multiple of this


class Embedding(nn.Module):
    """A table [size, hidden], looked up by row. `weight` may end with padding (see OutputHead).

    `name`: in the checkpoint."""

    weight: Weight
    packing: Packing | None = None
    is_shared = False

    def __init__(self, name: str, size: int, hidden: int) -> None:
        super().__init__()
        self.name, self.shard = name, full_shard(size)
        self.weight = plain_weight(padded(size), hidden)

    @property
    def size(self) -> int:
        """Number of rows without padding."""
        return self.shard.count

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        return self.weight.take(indices)

    def slots(self) -> Slots:
        shards, rows = (self.shard, full_shard(self.weight.shape[1])), slice(self.size)
        slots: Slots = {}
        if self.packing is not None:
            slots |= packed_slots(self.weight, self.name, self.packing, rows, shards)
        else:
            slots |= self.weight.part_slots(rows, shards)
        return {f"{self.name}.{kind}": slot for kind, slot in slots.items()}

    def pack(self) -> None:
        """Convert a quantized table to the layout of its device. Called once, after loading.

        One that the output head shares is packed there."""
        if self.packing is not None and not self.is_shared:
            self.weight = self.weight.finish(Epilogue())


class VocabularyEmbedding(Embedding):
    """Token embeddings. Each rank has a shard of the rows, and zeros for the others' tokens."""

    def __init__(self, name: str, size: int, hidden: int, *, is_tied: bool = False) -> None:
        """`is_tied`: the output head has the same weight."""
        nn.Module.__init__(self)
        self.name, self.group, self.shard = name, current_group(), vocabulary_shard(size)
        self.packing, self.is_shared = find_packing(name), is_tied
        rows = padded(self.shard.max_count)
        if self.packing is not None or is_tied:
            self.weight = new_head_weight(rows, hidden, self.packing)
        else:
            self.weight = plain_weight(rows, hidden)

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self.weight.take(indices)
        return self.group.all_reduce(self.weight.take_shard(indices, self.shard))


def vocabulary_shard(size: int) -> Shard:
    """Return this rank's tokens."""
    return aligned_shard(size, _alignment())


def padded(size: int) -> int:
    """Return the number of rows of a table. On a GPU it is padded."""
    return -(-size // _alignment()) * _alignment()


def _alignment() -> int:
    return ALIGNMENT if torch.get_default_device().type == "cuda" else 1
