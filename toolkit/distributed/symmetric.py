"""Small sums and gathered logits over the GPUs of one machine, through memory that they have of each other: faster than NCCL there."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch

from toolkit.distributed.group import Group
from toolkit.hardware.graph_capture import captured

logger = logging.getLogger(__name__)

Way = Literal["pushed", "one-shot", "two-shot", "NCCL"]
WIDTH = 4096
"""Numbers of 16 bits in the rows that are timed."""
ROWS = tuple(2**power for power in range(14))
_opened = False
"""Whether this process has done so: torch counts such meetings in a way that ranks of another age cannot follow."""
CALLS = 16
"""In one captured graph, of which the median replay counts."""
REPLAYS = 5


@dataclass(frozen=True, slots=True)
class Room:
    """A tensor that every rank has, and into which the others write."""

    tensor: torch.Tensor
    addresses: torch.Tensor
    """Of all ranks', int64 [size]."""
    handle: object
    """What keeps them open."""


@dataclass(frozen=True, slots=True)
class Symmetric:
    """What a rank needs for it."""

    peers: Any
    """`toolkit.kernels.triton.all_reduce.Peers`"""
    kernels: ModuleType
    buffer: torch.Tensor
    """This rank's, bytes."""
    handle: object
    """What keeps the others' open."""
    ways: tuple[tuple[int, Way], ...] = ()
    """The fastest for sums of up to so many bytes, rising; NCCL for larger ones."""
    rooms: dict[int, Room] = field(default_factory=dict)
    """By their addresses here."""

    def way(self, nbytes: int) -> Way:
        return next((way for most, way in self.ways if nbytes <= most), "NCCL")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        """The sum of all ranks' x; None where NCCL is better."""
        way = self.way(x.nbytes)
        if way == "NCCL" or not self.kernels.fits(x, self.peers.size, two_shot=way == "two-shot"):
            return None
        total: torch.Tensor = self.kernels.all_reduce(x, self.peers, two_shot=way == "two-shot")
        return total

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Fills all ranks' `out`; whether it is a room's beginning and this could be done."""
        room = self.rooms.get(out.data_ptr())
        if room is None:
            return False
        self.kernels.all_gather(x, out, room.addresses, self.peers)
        return True

    def room(self, group: Group, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for `all_gather`; the same one to all that ask for the same."""
        for room in self.rooms.values():
            if room.tensor.shape == shape and room.tensor.dtype == dtype:
                return room.tensor
        import torch.distributed._symmetric_memory as memory

        assert group.tensors is not None
        tensor = None
        with suppress(RuntimeError):  # no memory: as the caller finds when it allocates a plain one
            tensor = memory.empty(shape, dtype=dtype, device=self.buffer.device)
        # Before they meet, which cannot be interrupted: others may take long, or have failed.
        if not group.least(int(tensor is not None)) or tensor is None:
            return torch.empty(shape, dtype=dtype, device=self.buffer.device)
        handle = memory.rendezvous(tensor, group.tensors)
        addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=tensor.device)
        self.rooms[tensor.data_ptr()] = Room(tensor, addresses, handle)
        return tensor

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """(norm(total), total) of the sum of all ranks' x and the residual; None where it is better done apart."""
        way = self.way(x.nbytes)
        both: tuple[torch.Tensor, torch.Tensor] | None = None
        if way == "pushed" and self.kernels.fits_push(x):
            both = self.kernels.pushed_norm(x, residual, weight, bias, eps, self.peers)
        elif way in ("pushed", "one-shot") and self.kernels.fits_norm(x):
            both = self.kernels.all_reduce_norm(x, residual, weight, bias, eps, self.peers)
        return both

    def release(self) -> None:
        """Lets kernels come to their end that wait for a rank that is gone. What they and all later ones add up means nothing."""
        kernels, size = self.kernels, self.peers.size
        with torch.cuda.stream(torch.cuda.Stream(self.buffer.device)):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            met, pushed = self.peers.calls.cpu()
            flags = self.buffer[kernels.FLAGS_AT :][: 4 * size * kernels.PROGRAMS].view(torch.int32)
            flags.copy_((2 * met + 2**30)[:, None].expand(-1, size).reshape(-1))
            words = (
                self.buffer[kernels.PUSHED_AT :].view(torch.int64).view(2, kernels.PUSHED_ROWS, -1)
            )
            told = (pushed[: kernels.PUSHED_ROWS] + 2**30).long() << 32
            words.copy_(told[None, :, None].expand_as(words))


def opened(group: Group, device: torch.device) -> Group:
    """The group with its ranks' memory open to each other, where all are GPUs of one machine that can be; nothing is made of it before
    it is `timed`.
    """
    global _opened
    if group.size == 1 or group.size > 8 or device.type != "cuda" or not _on_one_machine(group):
        return group
    if group.least(int(not _opened)) == 0:
        logger.info(
            "all-reduce through NCCL alone: this process has been a rank of another engine before"
        )
        return group
    _opened, why, symmetric = True, "another rank cannot", None
    try:
        kernels, buffer = _allocate(group, device)
    except Exception as error:  # no Triton; the driver's, torch's and the machine's reasons: none is the user's mistake
        why, buffer = str(error).splitlines()[0], None
    if (
        group.least(int(buffer is not None)) and buffer is not None
    ):  # else those that have one would wait for the others
        try:
            symmetric = _meet(group, kernels, buffer)
        except Exception as error:
            why = str(error).splitlines()[0]
        # Also where all wait for each other: nobody writes before all have zeroed theirs.
        if not group.least(int(symmetric is not None)):
            symmetric = None
    if symmetric is None:
        logger.warning(
            "all-reduce through NCCL alone: the GPUs cannot read each other's memory (%s)", why
        )
        return group
    return replace(group, symmetric=symmetric)


def timed(group: Group, device: torch.device) -> Group:
    """The group with the fastest way for each size, which the log tells."""
    if not isinstance(group.symmetric, Symmetric):
        return group
    times = _times(group, group.symmetric, device)
    ways = tuple((size, min(found, key=lambda way: found[way])) for size, found in times.items())
    logger.info("all-reduce over %d GPUs: %s", group.size, ", ".join(_described(times)))
    return replace(group, symmetric=replace(group.symmetric, ways=ways))


def _on_one_machine(group: Group) -> bool:
    """Also in one container, as what is open to others is handed over by the numbers of processes."""
    try:
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "mnt", "net")]
        machine = "".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *spaces])
    except OSError:
        machine = socket.gethostname()
    number = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:4])
    return group.least(number) == -group.least(-number)


def _allocate(group: Group, device: torch.device) -> tuple[ModuleType, torch.Tensor]:
    """(the kernels, this rank's buffer)"""
    # Multicast over NVLink is not used here, and a program that ends badly while it is can take the switch down for others.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as memory

    from toolkit.kernels.triton import all_reduce as kernels

    buffer = memory.empty(kernels.buffer_bytes(group.size), dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    return kernels, buffer


def _meet(group: Group, kernels: ModuleType, buffer: torch.Tensor) -> Symmetric:
    import torch.distributed._symmetric_memory as memory

    assert group.tensors is not None
    handle = memory.rendezvous(buffer, group.tensors)
    addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=buffer.device)
    calls = torch.zeros(2, kernels.PROGRAMS, dtype=torch.int32, device=buffer.device)
    torch.cuda.synchronize(buffer.device)
    return Symmetric(
        kernels.Peers(group.rank, group.size, addresses, calls), kernels, buffer, handle
    )


def _times(group: Group, symmetric: Symmetric, device: torch.device) -> dict[int, dict[Way, float]]:
    """Microseconds of sums of so many bytes with the norm after them, the slowest rank's: the same numbers on all ranks."""
    from toolkit.kernels.triton.norm import add_rms_norm

    kernels, peers = symmetric.kernels, symmetric.peers
    found: dict[int, dict[Way, float]] = {}
    weight = torch.ones(WIDTH, dtype=torch.bfloat16, device=device)
    for rows in ROWS:
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device)
        rest = torch.zeros_like(x), weight, None, 1e-5
        ways: dict[Way, Callable[[], object]] = {
            "NCCL": partial(_sum_and_norm, group.all_reduce, add_rms_norm, x, rest[0], weight)
        }
        if kernels.fits_push(x):
            ways["pushed"] = partial(kernels.pushed_norm, x, *rest, peers)
        if kernels.fits_norm(x):
            ways["one-shot"] = partial(kernels.all_reduce_norm, x, *rest, peers)
        if group.size > 2 and kernels.fits(x, group.size, two_shot=True):
            two_shot = partial(kernels.all_reduce, peers=peers, two_shot=True)
            ways["two-shot"] = partial(_sum_and_norm, two_shot, add_rms_norm, x, rest[0], weight)
        found[x.nbytes] = {
            way: -group.least(-round(1000 * _time(call))) / 1000 for way, call in ways.items()
        }
    return found


def _sum_and_norm(
    add_up: Callable[[torch.Tensor], torch.Tensor],
    add_rms_norm: Callable[..., object],
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
) -> None:
    add_rms_norm(add_up(x), residual, weight, 1e-5)


def _time(call: Callable[[], object]) -> float:
    """Microseconds of a call, replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    taken: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(taken)


def _described(times: dict[int, dict[Way, float]]) -> Iterable[str]:
    """`8 KiB one-shot 5.1 us (NCCL 14.0)`"""
    for size, found in times.items():
        best = min(found, key=lambda way: found[way])
        others = ", ".join(f"{way} {found[way]:.1f}" for way in sorted(found) if way != best)
        name = f"{size >> 10} KiB" if size < 2**20 else f"{size >> 20} MiB"
        yield f"{name} {best} {found[best]:.1f} us ({others})"
