"""Free memory of a device, and out-of-memory errors."""

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import psutil
import torch

from toolkit.config.engine import MEMORY_VARIABLE
from toolkit.errors import OutOfMemoryError
from toolkit.hardware import cgroup
from toolkit.hardware.graph_capture import empty_cache
from toolkit.units import GIB, size

OTHERS_MIN_BYTES, OTHERS_MIN_FRACTION = 2 * GIB, 0.05
"""Smallest reported usage of other programs: more than CUDA and NCCL use in a process."""


def available(device: torch.device, used: int = 0) -> int:
    """Return the bytes that can still be allocated.

    On a CPU: within the container's limit and, with several engines, within this engine's share,
    of which `used` bytes are used."""
    if device.type == "cuda":
        with suppress(RuntimeError):  # PyTorch may refuse after a failed capture
            empty_cache()  # memory of an earlier model in this process, for example
        return int(torch.cuda.mem_get_info(device)[0])
    free = min(int(psutil.virtual_memory().available), cgroup.memory()[1])
    share = os.environ.get(MEMORY_VARIABLE)
    return free if share is None else min(free, max(0, int(share) - used))


def other_programs(device: torch.device) -> str:
    """Return a sentence on the GPU memory that other programs use. Empty if it is little."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    if used < max(OTHERS_MIN_BYTES, OTHERS_MIN_FRACTION * total):
        return ""
    return (
        f" Other programs use about {used / GIB:.0f} of this GPU's {total / GIB:.0f} GiB "
        f"(nvidia-smi lists them)."
    )


def is_out_of_memory(error: Exception) -> bool:
    """Return whether a step failed for lack of memory, on the GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text
        or ("CUDA" in text and "out of memory" in text)
    )


@contextmanager
def explain_out_of_memory(what: str, device: torch.device, advice: str) -> Iterator[None]:
    """Turn out-of-memory errors into OutOfMemoryError, with what needed memory and `advice`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        free = f"{size(available(device))} of {device.type} memory are free"
        raise OutOfMemoryError(f"Not enough memory for {what} ({free}); {advice}.") from error


def is_fatal(error: Exception) -> bool:
    """Return whether the device can run no more steps: CUDA errors other than OOM persist."""
    return not is_out_of_memory(error) and any(
        text in str(error) for text in ("CUDA error", "Triton Error [CUDA]")
    )


def trim_heap() -> None:
    """Release memory that was freed but kept by the C library, such as that of packed weights."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros. On a CPU these are zero pages, which take memory when first written."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    zeros = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8))
    return zeros.view(dtype).view(shape)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device, without waiting for its work."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
