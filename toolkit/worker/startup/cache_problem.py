"""The number of blocks in a KV cache, and why a cache does not fit. Imports no torch."""

import math
from typing import NamedTuple

from toolkit.config import CacheConfig
from toolkit.models.memory import MemoryLayout
from toolkit.scheduler.states import GRAIN
from toolkit.units import GIB, size

STATE_SHARE = 0.25
"""Share of a cache's memory for snapshots of states, if --state-cache-gib is not given."""
REQUEST_SHARE = 0.5
"""Largest share for the states of requests, of a cache's memory and of the swap space. If it is too
small for --max-num-seqs, requests take the slots of snapshots, and then wait; preempted ones
without a slot on the host are recomputed."""

EXPANDED_SHARE = 0.125
"""Largest share of the room for a cache that weights of integers may take in 16 bits, too."""
EXPANDED_REQUESTS = 4  # of full length that must fit next to them
EXPANDED_TOKENS = 256  # from more than so many in a step on, all GPUs use them


class CacheCounts(NamedTuple):
    """Parts of a cache. A block is a page, if layers are in several groups."""

    blocks: int  # on the device
    host_blocks: int
    requests: int  # for whose states there is room, if the model has any
    snapshots: int  # of states
    host_slots: int  # for states of preempted requests


def count_parts(
    config: CacheConfig,
    layout: MemoryLayout,
    *,
    room: int,
    max_num_seqs: int,
    max_model_len: int,
    on_gpu: bool,
) -> CacheCounts:
    """Return the parts of a cache. `room`: free bytes for it.

    On a CPU, blocks for more than max_num_seqs requests of full length would waste memory. Swap
    space has the states of at most max_num_seqs requests, and blocks in the rest. Snapshots are at
    most those of all blocks."""
    block_bytes, room, requests = layout.block_bytes, max(0, room), max_num_seqs
    is_given = config.num_gpu_blocks_override is not None or config.kv_cache_memory is not None
    if layout.row_bytes:
        if not is_given:  # one slot is no request's
            fitting = int(room * REQUEST_SHARE) // layout.row_bytes - 1
            requests = max(1, min(max_num_seqs, fitting))
        room = max(0, room - (requests + 1) * layout.row_bytes)
    most_useful = max_num_seqs * layout.pages_of(max_model_len)
    swap = int((config.swap_space if config.swap_space is not None else 4.0 * on_gpu) * GIB)
    host_slots = max_num_seqs
    if layout.row_bytes:
        host_slots = min(max_num_seqs, int(swap * REQUEST_SHARE) // layout.row_bytes)
        swap -= host_slots * layout.row_bytes
    host = swap // block_bytes if block_bytes else most_useful * (swap > 0)
    for_states = int((config.state_cache_gib or 0.0) * GIB)
    has_share = config.state_cache_gib is None and config.enable_prefix_caching
    if layout.row_bytes and has_share:
        for_states = int(room * STATE_SHARE)
    if config.num_gpu_blocks_override is not None:
        blocks = config.num_gpu_blocks_override
    elif not block_bytes:
        blocks = most_useful
    elif config.kv_cache_memory is not None:
        blocks = int(config.kv_cache_memory * GIB) // block_bytes
    else:
        blocks = max(0, room - for_states * (layout.row_bytes > 0)) // block_bytes
        blocks = blocks if on_gpu else min(blocks, most_useful)
    most_snapshots = blocks * config.block_size // GRAIN
    if not layout.row_bytes:  # of a pipeline stage, perhaps: it limits no other
        return CacheCounts(blocks, host, requests, most_snapshots, host_slots)
    if has_share and is_given and block_bytes:
        for_states = int(blocks * block_bytes * STATE_SHARE / (1 - STATE_SHARE))
    snapshots = min(for_states // layout.row_bytes, most_snapshots)
    return CacheCounts(blocks, host, requests, snapshots, host_slots)


def keeps_expanded(
    config: CacheConfig,
    layout: MemoryLayout,
    *,
    room: int,
    nbytes: int,
    max_num_seqs: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> bool:
    """Return whether a GPU keeps weights of integers in 16 bits, too: so many bytes.

    Not if a size of the cache is given, or if steps are small. `room`: bytes for weights and
    cache."""
    is_given = config.num_gpu_blocks_override is not None or config.kv_cache_memory is not None
    most_tokens = min(max_num_batched_tokens, max_num_seqs * max_model_len)
    if is_given or most_tokens <= EXPANDED_TOKENS or nbytes > room * EXPANDED_SHARE:
        return False
    blocks = count_parts(
        config,
        layout,
        room=room - nbytes,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        on_gpu=True,
    ).blocks
    return not layout.block_bytes or blocks >= EXPANDED_REQUESTS * layout.pages_of(max_model_len)


def table_bytes(
    num_rows: int,
    max_model_len: int,
    block_size: int,
    num_token_tables: int = 1,
    num_groups: int = 1,
) -> int:
    """Return the bytes of the rows' tokens and block tables, one for each group."""
    num_blocks = num_groups * -(-max_model_len // block_size)
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
    config: CacheConfig,
    *,
    num_blocks: int,
    layout: MemoryLayout,
    max_model_len: int,
    on_gpu: bool,
) -> str | None:
    """Return why a request of the full length does not fit, and what to change; None if it fits."""
    wanted, block_bytes = layout.pages_of(max_model_len), layout.block_bytes
    held = layout.longest(num_blocks)
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
