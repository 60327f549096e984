"""Whether weights and one request fit into memory, and how many blocks the KV cache gets."""

from __future__ import annotations

import os

import torch

from toolkit.config import CacheConfig
from toolkit.config.engine import MEMORY
from toolkit.errors import OutOfMemoryError
from toolkit.hardware.memory import GIB, available, gib, others


def require_weights_fit(size: int, device: torch.device, dtype: torch.dtype) -> None:
    """Raises OutOfMemoryError when weights of `size` bytes cannot fit in what is free."""
    free = available(device)
    if size > free:
        half = " Half of that with --dtype bfloat16." if dtype == torch.float32 else ""
        share = " for each engine" if device.type == "cpu" and MEMORY in os.environ else ""
        raise OutOfMemoryError(
            f"The model's weights take {gib(size)} in {str(dtype).removeprefix('torch.')}, and {gib(free)} of "
            f"{device.type} memory are free{share}.{half}{others(device)}"
        )


def cache_blocks(
    config: CacheConfig, *, room: int, block_bytes: int, most_useful: int, device: torch.device
) -> tuple[int, int]:
    """(blocks on the device, blocks on the host). `room`: bytes found free for the cache; `most_useful`:
    blocks that max_num_seqs full-length requests take, beyond which a CPU's memory is better left alone.
    """
    swap = (
        config.swap_space
        if config.swap_space is not None
        else (4.0 if device.type == "cuda" else 0.0)
    )
    host = int(swap * GIB) // block_bytes
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, host
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB) // block_bytes, host
    blocks = room // block_bytes
    return (blocks if device.type == "cuda" else min(blocks, most_useful)), host


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
            + f"(--gpu-memory-utilization, --kv-cache-memory).{others(device)}",
            param="max_model_len",
        )
