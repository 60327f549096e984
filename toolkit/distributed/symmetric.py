"""Collectives of small tensors over the GPUs of one machine, through memory that they share.

Faster than NCCL there. A CUDA graph holds these collectives like any other kernel.

A sum is pushed into the other ranks' memory or read from it (one-shot, two-shot), whichever was
fastest for its size at start; docs/notes/several-gpus.md has times. Each rank writes its logits
into the memory of all ranks, at their place in each row, where the sampler reads them."""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import statistics
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.distributed.group import Group
from toolkit.hardware.graph_capture import captured
from toolkit.kernels.reference import Norm
from toolkit.kernels.table import TritonKernels, triton_kernels_for

if TYPE_CHECKING:
    from toolkit.kernels.sums import Algorithm, Sums

logger = logging.getLogger(__name__)

WIDTH = 4096  # length of the timed rows, in numbers of 16 bits
ROWS = tuple(2**power for power in range(14))
_opened = False
"""True once this process has opened peer memory.

PyTorch counts the rendezvous of a process, and ranks with different counts never meet."""
CALLS = 16  # calls in a captured graph. The median of REPLAYS replays counts
REPLAYS = 5


@dataclass(frozen=True, slots=True)
class GatherBuffer:
    """A tensor of every rank that the other ranks write into."""

    tensor: torch.Tensor
    addresses: torch.Tensor  # of every rank's tensor, int64 [size]
    handle: object  # keeps them mapped


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """A rank's peer memory and its kernels. See `PeerMemory`."""

    sums: Sums
    kernels: TritonKernels
    buffer: torch.Tensor  # this rank's, bytes
    handle: object  # keeps the other ranks' buffers mapped
    gather_buffers: dict[int, GatherBuffer] = field(default_factory=dict)  # by local address

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor | None:
        return self.sums.all_reduce(x)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Fill all ranks' `out`. Return False if it does not begin a gather buffer."""
        buffer = self.gather_buffers.get(out.data_ptr())
        if buffer is None:
            return False
        self.kernels.all_gather(x, out, buffer.addresses, self.sums.peers)
        return True

    def gather_buffer(
        self, group: Group, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the buffer for `all_gather` of this shape and type: one for all callers."""
        for buffer in self.gather_buffers.values():
            if buffer.tensor.shape == shape and buffer.tensor.dtype == dtype:
                return buffer.tensor
        import torch.distributed._symmetric_memory as memory

        assert group.device_group is not None
        tensor = None
        with suppress(RuntimeError):  # out of memory: the plain allocation below reports it
            tensor = memory.empty(shape, dtype=dtype, device=self.buffer.device)
        # A rendezvous cannot be interrupted, so all ranks must have their tensor before it.
        if not group.minimum(int(tensor is not None)) or tensor is None:
            return torch.empty(shape, dtype=dtype, device=self.buffer.device)
        handle = memory.rendezvous(tensor, group.device_group)
        addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=tensor.device)
        self.gather_buffers[tensor.data_ptr()] = GatherBuffer(tensor, addresses, handle)
        return tensor

    def all_reduce_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm: Norm,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        return self.sums.all_reduce_norm(x, residual, norm)

    def release(self) -> None:
        """End the kernels that wait for a lost rank. All sums are meaningless from then on."""
        stream = torch.cuda.Stream(self.buffer.device)  # type: ignore[no-untyped-call]  # torch's
        with torch.cuda.stream(stream):
            self.kernels.release_peers(self.buffer, self.sums.peers)


def open_peer_memory(group: Group, device: torch.device) -> Group:
    """Return the group with peer memory, if its ranks are GPUs of one machine that allow it.

    Sums use it only after `choose_algorithms`."""
    global _opened
    if group.size == 1 or group.size > 8 or device.type != "cuda" or not _is_on_one_machine(group):
        return group
    if group.minimum(int(not _opened)) == 0:
        logger.info(
            "all-reduce uses NCCL only: this process has been a rank of another engine before"
        )
        return group
    _opened, why, memory = True, "another rank cannot", None
    try:
        kernels, buffer = _allocate(group, device)
    except Exception as error:  # no Triton, or a reason of the driver, PyTorch or the machine
        why, buffer = str(error).splitlines()[0], None
    # The rendezvous waits for all ranks, so none begins it alone.
    if group.minimum(int(buffer is not None)) and buffer is not None:
        try:
            memory = _rendezvous(group, kernels, buffer)
        except Exception as error:
            why = str(error).splitlines()[0]
        # This also waits until all ranks have zeroed their buffers, before any writes to one.
        if not group.minimum(int(memory is not None)):
            memory = None
    if memory is None:
        logger.warning(
            "all-reduce uses NCCL only: the GPUs cannot read each other's memory (%s)", why
        )
        return group
    return replace(group, peer_memory=memory)


def choose_algorithms(group: Group, device: torch.device) -> Group:
    """Return the group with the fastest algorithm for each size. Logs the times."""
    memory = group.peer_memory
    if not isinstance(memory, SymmetricMemory):
        return group
    times = _measure(group, memory, device)
    fastest = tuple((size, min(found, key=found.__getitem__)) for size, found in times.items())
    logger.info("all-reduce over %d GPUs: %s", group.size, ", ".join(_describe(times)))
    sums = replace(memory.sums, algorithms=fastest)
    return replace(group, peer_memory=replace(memory, sums=sums))


def _is_on_one_machine(group: Group) -> bool:
    """Return True if all ranks are on one machine and in one container.

    Memory handles are passed on by process id."""
    try:
        spaces = [str(Path(f"/proc/self/ns/{kind}").readlink()) for kind in ("pid", "mnt", "net")]
        machine = "".join([Path("/proc/sys/kernel/random/boot_id").read_text(), *spaces])
    except OSError:
        machine = socket.gethostname()
    number = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:4])
    return group.minimum(number) == -group.minimum(-number)


def _allocate(group: Group, device: torch.device) -> tuple[TritonKernels, torch.Tensor]:
    """Return the kernels and this rank's buffer. Raises RuntimeError if there are none."""
    # A process that dies while it uses NVLink multicast can take the switch down for others.
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    import torch.distributed._symmetric_memory as memory

    kernels = triton_kernels_for(device)
    if kernels is None:
        raise RuntimeError("the package triton is not installed")
    buffer = memory.empty(kernels.peer_buffer_bytes(group.size), dtype=torch.uint8, device=device)
    buffer.zero_()
    torch.cuda.synchronize(device)
    return kernels, buffer


def _rendezvous(group: Group, kernels: TritonKernels, buffer: torch.Tensor) -> SymmetricMemory:
    import torch.distributed._symmetric_memory as memory

    assert group.device_group is not None
    handle = memory.rendezvous(buffer, group.device_group)
    addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64, device=buffer.device)
    peers = kernels.make_peers(group.rank, addresses)
    torch.cuda.synchronize(buffer.device)
    return SymmetricMemory(kernels.sums(peers), kernels, buffer, handle)


def _measure(
    group: Group, memory: SymmetricMemory, device: torch.device
) -> dict[int, dict[Algorithm, float]]:
    """Return microseconds of a sum and the norm after it, by bytes of the sum.

    They are the slowest rank's, and so the same on all ranks."""
    found: dict[int, dict[Algorithm, float]] = {}
    norm = Norm(torch.ones(WIDTH, dtype=torch.bfloat16, device=device), None, 1e-5, False)
    for rows in ROWS:
        x = torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=device)
        calls = memory.sums.candidates(group.all_reduce, x, torch.zeros_like(x), norm)
        found[x.nbytes] = {
            name: -group.minimum(-round(1000 * _time(call))) / 1000 for name, call in calls.items()
        }
    return found


def _time(call: Callable[[], object]) -> float:
    """Return the microseconds of a call in a replayed graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with captured(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    taken: list[float] = []
    for _ in range(REPLAYS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        taken.append(1000 * start.elapsed_time(end) / CALLS)
    return statistics.median(taken)


def _describe(times: dict[int, dict[Algorithm, float]]) -> Iterable[str]:
    """Yield `8 KiB one-shot 5.1 us (NCCL 14.0)` for each size."""
    for size, found in times.items():
        best = min(found, key=found.__getitem__)
        others = ", ".join(f"{one} {found[one]:.1f}" for one in sorted(found) if one != best)
        name = f"{size >> 10} KiB" if size < 2**20 else f"{size >> 20} MiB"
        yield f"{name} {best} {found[best]:.1f} us ({others})"
