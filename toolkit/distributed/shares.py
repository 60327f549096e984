"""Shards: the part of a dimension that each rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from toolkit.distributed.group import SINGLE, Group
from toolkit.distributed.stage import SINGLE_STAGE, Stage
from toolkit.errors import ConfigError

_group: ContextVar[Group] = ContextVar("tensor parallel group", default=SINGLE)
_stage: ContextVar[Stage] = ContextVar("pipeline stage", default=SINGLE_STAGE)
_splits_experts: ContextVar[bool] = ContextVar("experts are split", default=True)


@contextmanager
def parallel(
    group: Group, stage: Stage = SINGLE_STAGE, *, splits_experts: bool = True
) -> Iterator[None]:
    """Build models with the layers of this stage, and this rank's shards of their weights.

    `splits_experts`: each rank has a part of every expert, else complete ones."""
    group_token, stage_token = _group.set(group), _stage.set(stage)
    experts_token = _splits_experts.set(splits_experts)
    try:
        yield
    finally:
        _group.reset(group_token)
        _stage.reset(stage_token)
        _splits_experts.reset(experts_token)


def current_stage() -> Stage:
    """Return the stage of the model being built."""
    return _stage.get()


def current_group() -> Group:
    """Return the group of the model being built."""
    return _group.get()


@dataclass(frozen=True, slots=True)
class Shard:
    """`count` of the `total` entries of a dimension, from `begin` on."""

    total: int
    begin: int
    count: int
    max_count: int = 0  # over the ranks, where their counts differ

    @property
    def is_full(self) -> bool:
        return self.count == self.total

    @property
    def entries(self) -> slice:
        return slice(self.begin, self.begin + self.count)

    def times(self, size: int) -> Shard:
        """Return the shard in units that are `size` times smaller: heads to features."""
        return Shard(self.total * size, self.begin * size, self.count * size)


def full_shard(total: int) -> Shard:
    """Return all of a dimension."""
    return Shard(total, 0, total)


def even_shard(total: int, what: str) -> Shard:
    """Return one of equal shards. `what`: the entries, for messages.

    Raises ConfigError if the ranks do not divide the total."""
    group = current_group()
    if total % group.size:
        raise ConfigError(
            f"--tensor-parallel-size {group.size}: the model's {total} {what} cannot be divided "
            "evenly.",
            param="tensor_parallel_size",
        )
    count = total // group.size
    return Shard(total, group.rank * count, count)


def kv_head_shard(total: int) -> Shard:
    """Return one of equal shards of the KV heads. Fewer heads than ranks are replicated."""
    group = current_group()
    if total < group.size and group.size % total == 0:
        return Shard(total, group.rank // (group.size // total), 1)
    return even_shard(total, "KV heads")


def splits_experts() -> bool:
    """Return True if each rank has a part of every expert of the model being built."""
    return _splits_experts.get()


def expert_shards(num_experts: int, size: int) -> tuple[Shard, Shard]:
    """Return this rank's shards of the experts, and of each one's features."""
    if splits_experts():
        return full_shard(num_experts), even_shard(size, "features of an expert")
    return even_shard(num_experts, "experts"), full_shard(size)


def aligned_shard(total: int, multiple: int) -> Shard:
    """Return one of shards of a size divisible by `multiple`. The last may be short or empty."""
    group = current_group()
    if group.size == 1:
        return Shard(total, 0, total, total)
    size = -(-total // (group.size * multiple)) * multiple
    begin = min(total, group.rank * size)
    return Shard(total, begin, min(size, total - begin), size)
