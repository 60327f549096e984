"""How much memory there is, and how much of it the KV cache gets."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil
import torch

from toolkit import cgroup
from toolkit.capture import empty_cache
from toolkit.config import CacheConfig
from toolkit.config.engine import MEMORY
from toolkit.errors import OutOfMemoryError

GIB = 2**30
MUCH, MUCH_OF_IT = 2 * GIB, 0.05
"""Bytes, and of a GPU's: more than CUDA and NCCL take in a process."""
CPU_SHARE = 0.4
"""Of the memory that is free on a CPU machine."""


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


def require_weights_fit(size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises OutOfMemoryError when weights of `size` bytes cannot fit in what is free."""
    free = available(device)
    if size > free:
        half = " Half of that with --dtype bfloat16." if dtype == torch.float32 else ""
        share = " for each engine" if device.type == "cpu" and MEMORY in os.environ else ""
        raise OutOfMemoryError(
            f"The model's weights take {gib(size)} in {str(dtype).removeprefix('torch.')}, and {gib(free)} of "
            f"{device.type} memory are free{share}.{half}{_others(device)}"
        )


def cache_blocks(
    config: CacheConfig, *, room: int, block_bytes: int, most_useful: int, device: torch.device
) -> tuple[int, int]:
    """(blocks on the device, blocks on the host). `room`: bytes found free for the cache; `most_useful`:
    blocks that max_num_seqs full-length requests take, beyond which a CPU's memory is better left alone.
    """
    swap = config.swap_space if config.swap_space is not None else (4.0 if device.type == "cuda" else 0.0)
    host = int(swap * GIB) // block_bytes
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, host
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB) // block_bytes, host
    blocks = room // block_bytes
    return (blocks if device.type == "cuda" else min(blocks, most_useful)), host


def _others(device: torch.device) -> str:
    """A sentence on what other programs have of a GPU, where that is much."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    taken = total - free - torch.cuda.memory_reserved(device)
    if taken < max(MUCH, MUCH_OF_IT * total):
        return ""
    return f" Other programs have some {taken / GIB:.0f} of this GPU's {total / GIB:.0f} GiB (nvidia-smi lists them)."


def require_one_request_fits(
    num_blocks: int, block_size: int, max_model_len: int, block_bytes: int, device: torch.device
) -> None:
    """Raises OutOfMemoryError naming the largest max_model_len that fits."""
    fits = num_blocks * block_size
    if fits < max_model_len:
        raise OutOfMemoryError(
            f"The KV cache has room for {fits} tokens ({gib(num_blocks * block_bytes)}), and one request of the full "
            f"length, {max_model_len} tokens, takes {gib(-(-max_model_len // block_size) * block_bytes)}. "
            + (
                f"Use --max-model-len {fits} or less, or give the cache more memory "
                if fits
                else "Give the cache more memory "
            )
            + f"(--gpu-memory-utilization, --kv-cache-memory).{_others(device)}",
            param="max_model_len",
        )


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step failed because memory was full, on the GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and (
        "DefaultCPUAllocator: can't allocate memory" in text or ("CUDA" in text and "out of memory" in text)
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
