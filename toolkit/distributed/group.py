"""The ranks of one model, and their collectives: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore

from toolkit.errors import ConfigError

if TYPE_CHECKING:
    from toolkit.kernels.reference import Norm

# The older name warns at each call where the newer one exists.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)

TIMEOUT_SECONDS = 1800.0
"""Seconds that a rank waits for another: long, since one may be loading weights.

The executor notices ranks that died or hang in a step."""


class PeerMemory(Protocol):
    """Collectives of small tensors through memory that the ranks share."""

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
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return (norm(total), total), or None where two steps are faster."""
        ...

    def gather_buffer(
        self, group: Group, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
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
    device_group: dist.ProcessGroup | None = None  # for tensors on the device; None for one rank
    host_group: dist.ProcessGroup | None = None  # for numbers on the host
    peer_memory: PeerMemory | None = None  # on GPUs of one machine

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of all ranks' x, which may be overwritten."""
        if self.size == 1:
            return x
        if self.peer_memory is not None and (total := self.peer_memory.all_reduce(x)) is not None:
            return total
        dist.all_reduce(x, group=self.device_group)
        return x

    def all_gather(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return [n, size · width] of every rank's [n, width], in rank order.

        With several ranks the result is `out`, if one is given."""
        if self.size == 1:
            return x
        if self.peer_memory is not None and out is not None and self.peer_memory.all_gather(x, out):
            return out
        n, width = x.shape
        parts = torch.empty((self.size, n, width), dtype=x.dtype, device=x.device)
        _gather(parts.view(-1, width), x.contiguous(), group=self.device_group)
        out = (
            torch.empty((n, self.size * width), dtype=x.dtype, device=x.device)
            if out is None
            else out
        )
        out.view(n, self.size, width).copy_(parts.transpose(0, 1))
        return out

    def gather_buffer(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an empty tensor whose first rows `all_gather` fills fastest."""
        if self.peer_memory is not None:
            return self.peer_memory.gather_buffer(self, shape, dtype)
        return torch.empty(shape, dtype=dtype, device=device)

    def minimum(self, number: int) -> int:
        """Return the minimum of the ranks' numbers."""
        return self._reduce(number, dist.ReduceOp.MIN)

    def total(self, number: int) -> int:
        """Return the sum of the ranks' numbers."""
        return self._reduce(number, dist.ReduceOp.SUM)

    def subgroup(self, size: int) -> Group:
        """Return this rank's group of `size` consecutive ranks. All ranks must call it at once."""
        if size == 1:
            return SINGLE
        subgroup = SINGLE
        for first in range(0, self.size, size):
            ranks, timeout = list(range(first, first + size)), timedelta(seconds=TIMEOUT_SECONDS)
            device_group = host_group = dist.new_group(ranks, timeout=timeout)
            if self.host_group is not self.device_group:
                host_group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            if first <= self.rank < first + size:
                subgroup = Group(self.rank - first, size, device_group, host_group)
        return subgroup

    def close(self) -> None:
        """Leave the other ranks. They may be lost, so NCCL must not wait for them."""
        if self.size == 1:
            return
        if self.device_group is not None and dist.get_backend(self.device_group) == "nccl":
            _abort()
        else:
            dist.destroy_process_group()

    def _reduce(self, number: int, operation: dist.ReduceOp.RedOpType) -> int:
        if self.size == 1:
            return number
        value = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(value, operation, group=self.host_group)
        return int(value)


SINGLE = Group()  # the only rank of a model


def connect(rank: int, size: int, rendezvous: Path | str, device: torch.device) -> Group:
    """Wait for all ranks, and return their group.

    `rendezvous`: a new, private folder, or the address tcp://HOST:PORT of a store.
    Raises ConfigError if this process is a rank already, or NCCL does not work here."""
    if size == 1:
        return SINGLE
    if dist.is_initialized():
        raise ConfigError(
            "This process is a rank of another model already: end that first (LLM.shutdown), or "
            "start the model in another process."
        )
    # It names the group. A start that failed here would leave it higher than the other ranks', and
    # they would wait for each other until the time-out.
    dist.distributed_c10d._world.group_count = 0
    cuda = device.type == "cuda"
    # Stages send and receive in the order of their steps anyway, so one after the other is right.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store: Store
    if isinstance(rendezvous, str):
        address = urlsplit(rendezvous)
        store = TCPStore(
            address.hostname or "", address.port or 0, is_master=False, timeout=timeout
        )
    else:
        if not cuda:  # gloo listens on a port; all ranks are on this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = FileStore(str(rendezvous / "ranks"), size)
    try:
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=timeout,
            device_id=device if cuda else None,
        )
    except dist.DistBackendError as error:
        problem = nccl_problem(str(error))
        if problem is None:
            raise
        raise ConfigError(
            f"NCCL cannot connect the GPUs: {problem}. Check the environment variables NCCL_*; "
            "NCCL_DEBUG=INFO shows what it does."
        ) from None
    world = dist.group.WORLD
    return Group(
        rank, size, world, dist.new_group(backend="gloo", timeout=timeout) if cuda else world
    )


def nccl_problem(message: str) -> str | None:
    """Return what NCCL says about this machine. None: nothing, or that another rank is gone."""
    kind = re.search(r"nccl\w+Error|ncclInvalid\w+", message)
    if kind is None or kind[0] == "ncclRemoteError":
        return None
    last = " ".join(message.partition("Last error:")[2].split()) or kind[0]
    return None if re.search("connect|remote peer|timed out", last, re.IGNORECASE) else last
