"""Pipeline parallelism: the stages of a model, and the transfer of hidden states between them.

Hidden states, with the residual added, go to the same rank of the next stage: by gloo in the
background, by NCCL in the order of the device's work, outside CUDA graphs. Every rank has the state
of all rows, and as many KV blocks as the rank that can hold the fewest. Devices send nothing back:
the first rank of the last stage returns a step's tokens, and all stages get them with the next step
of their rows (`SchedulerOutput.known_tokens`). So a request decodes in one step at a time
(`scheduler.planner`)."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from toolkit.distributed.group import Group


@dataclass(frozen=True, slots=True)
class Stage:
    """One of `count` runs of layers. The first one embeds; the last has the head and samples."""

    index: int = 0
    count: int = 1
    link: Link | None = None  # to the adjacent stages; None if nothing is computed

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """Fill x from the stage before."""
        assert self.link is not None
        return self.link.receive(x)

    def send(self, x: torch.Tensor) -> None:
        """Send x to the stage after."""
        assert self.link is not None
        self.link.send(x)


SINGLE_STAGE = Stage()  # the only stage, with all layers


class Link:
    """Connection of a rank to its counterparts in the adjacent stages. Tensors arrive in order."""

    def __init__(self, previous: int, following: int, max_in_flight: int) -> None:
        """`previous`, `following`: world ranks. `max_in_flight`: sends, at most one per step."""
        self._previous, self._following = previous, following
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[dist.Work | None, torch.Tensor]] = deque()

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        dist.recv(x, self._previous)
        return x

    def send(self, x: torch.Tensor) -> None:
        if x.is_cuda:  # ordered by the stream: the host does not wait
            dist.send(x, self._following)
            return
        x = x.clone()  # sent in the background, while the next step overwrites its buffers
        self._in_flight.append((dist.isend(x, self._following), x))
        if len(self._in_flight) > self._max_in_flight:
            work, _ = self._in_flight.popleft()
            assert work is not None
            work.wait()


def split_stages(world: Group, size: int) -> tuple[Group, Stage]:
    """Return (ranks of this one's stage, stage) for stages of `size` consecutive ranks."""
    if world.size == size:
        return world, SINGLE_STAGE
    count = world.size // size
    link = Link(world.rank - size, world.rank + size, max_in_flight=count + 1)
    return world.subgroup(size), Stage(world.rank // size, count, link)
