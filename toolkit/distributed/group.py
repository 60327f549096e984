"""The ranks of one model, and their collectives: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from toolkit.errors import ConfigError

# The newer name where there is one, since the older then warns at each call.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)

PATIENCE = 1800.0
"""Seconds that a rank waits for another: while weights are loaded, that is long. That one has ended, or hangs in a step, is for the
executor to notice."""


class PeerMemory(Protocol):
    """Collectives of small tensors through memory that the ranks have of each other."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of all ranks' x, or None where NCCL is faster."""
        ...

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Fill all ranks' `out`. Return False where that is not possible."""
        ...

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (norm(total), total), or None where two steps are faster."""
        ...

    def room(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer for `all_gather`."""
        ...

    def release(self) -> None:
        """End the kernels that wait for a lost rank."""
        ...


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that share a model; every rank calls the same collectives in the same order."""

    rank: int = 0
    size: int = 1
    tensors: dist.ProcessGroup | None = None
    """For what is on the device; None in a group of one."""
    numbers: dist.ProcessGroup | None = None
    """For what is on the host."""
    symmetric: PeerMemory | None = None
    """On GPUs of one machine."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which may be written over."""
        if self.size == 1:
            return x
        if self.symmetric is not None and (total := self.symmetric.all_reduce(x)) is not None:
            return total
        dist.all_reduce(x, group=self.tensors)
        return x

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[n, width] of every rank to [n, size · width], in rank order; in `out` where one is given and there are several ranks."""
        if self.size == 1:
            return x
        if self.symmetric is not None and out is not None and self.symmetric.all_gather(x, out):
            return out
        n, width = x.shape
        parts = torch.empty((self.size, n, width), dtype=x.dtype, device=x.device)
        _gather(parts.view(-1, width), x.contiguous(), group=self.tensors)
        out = (
            torch.empty((n, self.size * width), dtype=x.dtype, device=x.device)
            if out is None
            else out
        )
        out.view(n, self.size, width).copy_(parts.transpose(0, 1))
        return out

    def room(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """A tensor, not filled, whose first rows all_gather fills fastest."""
        if self.symmetric is not None:
            return self.symmetric.room(self, shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        return self._agree(number, dist.ReduceOp.MIN)

    def total(self, number: int) -> int:
        """The sum of the ranks' numbers."""
        return self._agree(number, dist.ReduceOp.SUM)

    def part(self, size: int) -> Group:
        """The `size` ranks in a row that this one is of; every rank makes its part at the same time."""
        if size == 1:
            return SINGLE
        part = SINGLE
        for first in range(0, self.size, size):
            ranks, wait = list(range(first, first + size)), timedelta(seconds=PATIENCE)
            tensors = numbers = dist.new_group(ranks, timeout=wait)
            if self.numbers is not self.tensors:
                numbers = dist.new_group(ranks, timeout=wait, backend="gloo")
            if first <= self.rank < first + size:
                part = Group(self.rank - first, size, tensors, numbers)
        return part

    def close(self) -> None:
        """Leaves the other ranks, which may be gone: NCCL is not to wait for them."""
        if self.size == 1:
            return
        if self.tensors is not None and dist.get_backend(self.tensors) == "nccl":
            _abort()
        else:
            dist.destroy_process_group()

    def _agree(self, number: int, how: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value, how, group=self.numbers)
        return int(value)


SINGLE = Group()
"""One rank, which has everything."""


def connect(rank: int, size: int, meeting: Path | str, device: torch.device) -> Group:
    """Waits until all ranks are there. They find each other through files in the folder `meeting`, which is to be new, and nobody
    else's; or, on several machines, through the store that listens at tcp://HOST:PORT.
    """
    if size == 1:
        return SINGLE
    if dist.is_initialized():
        raise ConfigError(
            "This process is a rank of another model already: end that first (LLM.shutdown), or use a process of its own."
        )
    cuda = device.type == "cuda"
    wait = timedelta(seconds=PATIENCE)
    store: Store
    if isinstance(meeting, str):
        at = urlsplit(meeting)
        store = TCPStore(at.hostname or "", at.port or 0, is_master=False, timeout=wait)
    else:
        if not cuda:  # gloo listens on a port; the ranks are all on this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(str(meeting / "ranks"), size)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=wait,
        device_id=device if cuda else None,
    )
    world = dist.group.WORLD
    return Group(rank, size, world, dist.new_group(backend="gloo", timeout=wait) if cuda else world)
