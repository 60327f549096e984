"""Embedding tables."""

import torch
from torch import nn

from toolkit.distributed import Shard, aligned_shard, current_group, full_shard
from toolkit.weights.plain import plain_weight
from toolkit.weights.quantization import new_head_weight
from toolkit.weights.slots import Slots
from toolkit.weights.weight import Weight

ALIGNMENT = 64  # on a GPU a table's number of rows is a multiple of this


class Embedding(nn.Module):
    """A table [size, hidden], looked up by row. `weight` may end with padding (see OutputHead).

    `name`: in the checkpoint."""

    weight: Weight

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
        shards = self.shard, full_shard(self.weight.shape[1])
        slots = self.weight.part_slots(slice(self.size), shards)
        return {f"{self.name}.{kind}": slot for kind, slot in slots.items()}


class VocabularyEmbedding(Embedding):
    """Token embeddings. Each rank has a shard of the rows, and zeros for the others' tokens."""

    def __init__(self, name: str, size: int, hidden: int, *, is_tied: bool = False) -> None:
        """`is_tied`: the output head has the same weight."""
        nn.Module.__init__(self)
        self.name, self.group, self.shard = name, current_group(), vocabulary_shard(size)
        make = new_head_weight if is_tied else plain_weight
        self.weight = make(padded(self.shard.max_count), hidden)

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
