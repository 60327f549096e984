"""Explain a KV cache that is too small for one request. Imports no torch."""

import math

from toolkit.config import CacheConfig
from toolkit.units import GIB, size


def cache_problem(
    config: CacheConfig, *, num_blocks: int, block_bytes: int, max_model_len: int, on_gpu: bool
) -> str | None:
    """Return why a request of the full length does not fit, and what to change; None if it fits."""
    held, wanted = num_blocks * config.block_size, -(-max_model_len // config.block_size)
    if held >= max_model_len:
        return None
    room = (
        f"room for {held} tokens ({size(num_blocks * block_bytes)})"
        if held
        else f"no room for a block of {config.block_size} tokens ({size(block_bytes)})"
    )
    changes = [f"use --max-model-len {held} or less"] if held else []
    least = _gib(wanted * block_bytes)
    if config.num_gpu_blocks_override is not None:
        changes.append(f"raise --num-gpu-blocks-override to {wanted}")
    elif config.kv_cache_memory is not None:
        changes.append(f"raise --kv-cache-memory to {least}")
    elif on_gpu:
        changes.append("give the cache more memory (--gpu-memory-utilization, --kv-cache-memory)")
    else:
        changes.append(f"end other programs, or set --kv-cache-memory {least}")
    advice = ", or ".join(changes)
    return (
        f"The KV cache has {room}, and one request of the full length, {max_model_len} tokens, "
        f"takes {size(wanted * block_bytes)}. {advice[0].upper()}{advice[1:]}."
    )


def _gib(num_bytes: int) -> str:
    """Return at least so many bytes in GiB, with two digits."""
    exact = num_bytes / GIB
    step = 10.0 ** (math.floor(math.log10(exact)) - 1)
    return f"{math.ceil(exact / step) * step:g}"
