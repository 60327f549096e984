"""Pipeline parallelism: the stages of a model, and the way of hidden states from one to the next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.distributed.group import Group


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` runs of a model's layers. The first one embeds, the last one has the output head and samples."""

    index: int = 0
    count: int = 1
    link: Link | None = None
    """To its neighbours; None where nothing is computed."""

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Fills x with what the stage before has sent."""
        assert self.link is not None
        return self.link.receive(x)

    def send(self, x: torch.Tensor) -> None:
        """To the stage after; x must not be changed any more."""
        assert self.link is not None
        self.link.send(x)


WHOLE = Stage()
"""The only one, with all layers."""


class Link:
    """From a rank to those with its place in the neighbouring stages; what is sent arrives in order."""

    def __init__(self, before: int, after: int, most_on_the_way: int) -> None:
        """`before`, `after`: their ranks. No more sends are under way than steps can be: `most_on_the_way`."""
        self._before, self._after = before, after
        self._most_on_the_way = most_on_the_way
        self._on_the_way: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, self._before)
        return x

    def send(self, x: torch.Tensor) -> None:
        if x.is_cuda:  # in the order of the device's work, for which nobody waits here
            dist.send(x, self._after)
            return
        self._on_the_way.append((dist.isend(x, self._after), x))
        if len(self._on_the_way) > self._most_on_the_way:
            work, _ = self._on_the_way.popleft()
            assert work is not None
            work.wait()


def stages(world: Group, size: int) -> tuple[Group, Stage]:
    """(the ranks of this one's stage, the stage) when `size` ranks in a row share each."""
    if world.size == size:
        return world, WHOLE
    count = world.size // size
    link = Link(world.rank - size, world.rank + size, most_on_the_way=count + 1)
    return world.part(size), Stage(world.rank // size, count, link)
