"""Free memory of a device, and running out of it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from toolkit.config.engine import MEMORY
from toolkit.errors import OutOfMemoryError
from toolkit.hardware import cgroup
from toolkit.hardware.graph_capture import empty_cache

GIB = 2**30
MUCH, MUCH_OF_IT = 2 * GIB, 0.05
"""Bytes, and of a GPU's: more than CUDA and NCCL take in a process."""


def gib(size: float) -> str:
    """1.5 GiB, or 12.0 MiB when that reads better."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def available(device: torch.device, taken: int = 0) -> int:
    """Bytes that can still be allocated; on a CPU within the container's limit and, of several engines, this one's share, of which
    so many are taken.
    """
    if device.type == "cuda":
        with suppress(RuntimeError):  # PyTorch may refuse to after a capture that broke
            empty_cache()  # of a model that this process had before, for one
        return int(torch.cuda.mem_get_info(device)[0])
    free = min(int(psutil.virtual_memory().available), cgroup.memory()[1])
    share = os.environ.get(MEMORY)
    return free if share is None else min(free, max(0, int(share) - taken))


def others(device: torch.device) -> str:
    """A sentence on what other programs have of a GPU, where that is much."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    if taken < max(MUCH, MUCH_OF_IT * total):
        return ""
    return f" Other programs have some {taken / GIB:.0f} of this GPU's {total / GIB:.0f} GiB (nvidia-smi lists them)."


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step failed because memory was full, on the GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or ("CUDA" in text and "out of memory" in text)
    )


@contextmanager
def room_for(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Where memory gets full inside, OutOfMemoryError says for what, and what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free = f"{gib(available(device))} of {device.type} memory are free"
        raise OutOfMemoryError(f"There is no room for {what} ({free}); {advice}.") from error


def is_fatal(error: Exception) -> bool:
    """Whether the device can run no further step: CUDA errors other than full memory stick."""
    return not is_out_of_memory(error) and any(
        said in str(error) for said in ("CUDA error", "Triton Error [CUDA]")
    )


def give_back() -> None:
    """Returns to the system what this process has freed and its C library keeps, as of weights loaded and then packed in another type."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)
