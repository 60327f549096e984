"""The number of blocks in a KV cache, and why a cache does not fit. Imports no torch."""

import math
from dataclasses import replace

from toolkit.config import CacheConfig
from toolkit.units import GIB, size


def count_blocks(
    config: CacheConfig,
    *,
    room: int,
    block_bytes: int,
    most_useful: int,
    on_gpu: bool,
    swaps: bool = True,
) -> tuple[int, int]:
    """Return (blocks on the device, blocks on the host).

    `room`: free bytes for the cache. `most_useful`: blocks of max_num_seqs full-length requests; on
    a CPU, more would waste memory, and blocks without bytes are of no use. `swaps`: requests can
    continue from blocks alone."""
    if not block_bytes:
        return config.num_gpu_blocks_override or most_useful, 0
    if not swaps:
        config = replace(config, swap_space=0.0)
    swap = config.swap_space if config.swap_space is not None else 4.0 * on_gpu
    host = int(swap * GIB) // block_bytes
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, host
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * GIB) // block_bytes, host
    blocks = max(0, room) // block_bytes
    return (blocks if on_gpu else min(blocks, most_useful)), host


def table_bytes(
    num_rows: int, max_model_len: int, block_size: int, num_token_tables: int = 1
) -> int:
    """Return the bytes of the rows' tokens and block tables."""
    num_blocks = -(-max_model_len // block_size)
    return 4 * num_rows * (num_token_tables * (max_model_len + 1) + num_blocks)


def describe_memory(
    config: CacheConfig, *, cache: int, swap: int, tables: int = 0, on_gpu: bool
) -> tuple[str, str]:
    """Return (what takes so many bytes, what to lower), for messages. Leaves out small parts."""
    setting = "--gpu-memory-utilization" if on_gpu else "--kv-cache-memory"
    if config.num_gpu_blocks_override is not None:
        setting = "--num-gpu-blocks-override"
    elif config.kv_cache_memory is not None:
        setting = "--kv-cache-memory"
    parts = [
        (cache, f"a KV cache of {size(cache)}", setting),
        (swap, f"{size(swap)} of swap space", "--swap-space"),
        (tables, f"{size(tables)} for the tokens of requests", "--max-num-seqs"),
    ]
    shown = [part for part in parts if 4 * part[0] >= cache + swap + tables]
    what = " and ".join(text for _, text, _ in shown)
    return what, f"lower {' or '.join(setting for *_, setting in shown)}"


def memory_problem(
    config: CacheConfig, *, free: int, cache: int = 0, swap: int = 0, tables: int = 0, kind: str
) -> str | None:
    """Return why so many bytes do not fit, and what to lower; None if they fit.

    `kind`: cpu or cuda, whose memory is free. Swap space counts if it is asked for: pages that are
    never written take no memory."""
    swap = swap if config.swap_space else 0
    if cache + swap + tables <= max(0, free):
        return None
    what, advice = describe_memory(
        config, cache=cache, swap=swap, tables=tables, on_gpu=kind == "cuda"
    )
    return (
        f"Not enough memory for {what} ({size(max(0, free))} of {kind} memory are free); {advice}."
    )


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
