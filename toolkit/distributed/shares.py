"""How much of a dimension each rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from toolkit.distributed.group import SINGLE, Group
from toolkit.distributed.stage import WHOLE, Stage
from toolkit.errors import ConfigError

_building: ContextVar[Group] = ContextVar("tensor parallel group", default=SINGLE)
_stage: ContextVar[Stage] = ContextVar("pipeline stage", default=WHOLE)


@contextmanager
def parallel(group: Group, stage: Stage = WHOLE) -> Iterator[None]:
    """Models that are made inside have this stage's layers, and of these this rank's part of the weights."""
    token, stage_token = _building.set(group), _stage.set(stage)
    try:
        yield
    finally:
        _building.reset(token)
        _stage.reset(stage_token)


def current_stage() -> Stage:
    """The stage that the model being built is."""
    return _stage.get()


def current() -> Group:
    """The group that the model being built is for."""
    return _building.get()


@dataclass(frozen=True, slots=True)
class Share:
    """`count` of the `total` entries of a dimension, from `begin` on."""

    total: int
    begin: int
    count: int
    largest: int = 0
    """Of the ranks' counts, where they differ."""

    @property
    def whole(self) -> bool:
        return self.count == self.total

    def times(self, size: int) -> Share:
        """Of entries that are `size` each."""
        return Share(self.total * size, self.begin * size, self.count * size)


def whole(total: int) -> Share:
    """All of a dimension."""
    return Share(total, 0, total)


def even(total: int, what: str) -> Share:
    """An equal share for each rank. Raises ConfigError when there is none; `what`: the entries' name in words."""
    group = current()
    if total % group.size:
        raise ConfigError(
            f"--tensor-parallel-size {group.size}: the model's {total} {what} cannot be shared out evenly.",
            param="tensor_parallel_size",
        )
    count = total // group.size
    return Share(total, group.rank * count, count)


def kv_heads(total: int) -> Share:
    """An equal share of the KV heads; where there are fewer of them than ranks, several ranks have the same one."""
    group = current()
    if total < group.size and group.size % total == 0:
        return Share(total, group.rank // (group.size // total), 1)
    return even(total, "KV heads")


def rounded_up(total: int, multiple: int) -> Share:
    """Shares of one size, a multiple of a number, of which the last ones may end early or be empty."""
    group = current()
    if group.size == 1:
        return Share(total, 0, total, total)
    size = -(-total // (group.size * multiple)) * multiple
    begin = min(total, group.rank * size)
    return Share(total, begin, min(size, total - begin), size)
