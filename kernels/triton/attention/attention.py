"""Paged attention on NVIDIA GPUs: FlashAttention-2 for packed prompts, Flash-Decoding for decode.

Prompts with heads of 128 have their own kernel on Hopper (`attention_hopper`). The other kernels
share a loop (`_attend` in `attention_kernels`): a tile of query rows stays in registers while tiles
of keys and values stream by, and a running maximum and sum keep the softmax exact (Dao,
"FlashAttention-2", arXiv:2307.08691). The rows of a tile are the (token, head) pairs that share a
KV head, so grouped heads read each key once. If a step has too few rows to fill the GPU, the keys
of a request are split over several programs, and a second kernel merges their results (Dao et al.,
"Flash-Decoding for long-context inference", 2023).

Nothing here waits for the GPU, and grids depend on host integers only, so a call can be captured in
a CUDA graph and replayed with other lengths."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ...reference import HeadNorm
from ..counters import counters
from ..hopper import is_hopper
from ..pdl import supported
from ..products.fp8 import FP8
from ..sizes import power_of_two
from .attention_kernels import LOG2_E, decode_kernel, merge_kernel, prefill_kernel
from .rotary import Transform, qk_norm_rope_write

MAX_SPLITS = 64
SHORT_WINDOW = 2**16  # bytes of a KV head's keys and values in a window: gpt-oss has 2**15
LONG_CONTEXT = 8192
"""Tokens from which one query takes longer than the step's prompts, unless its keys are split."""
MANY_REQUESTS = 64
"""Requests of a step with prompts from which those with one query have a launch of their own.

A tile of a prompt's rows computes for one query as long as for all of its rows."""
MAX_DECODE_ROWS = 128
"""Rows of a decode tile with several queries."""
MAX_DECODE_BYTES = 32 << 10
"""Queries of such a tile. With more, it does not fit the shared memory of every GPU."""
MAX_RESIDENT = 4
"""Decode programs that start together on a multiprocessor, so that their order does not matter."""


class Tile(NamedTuple):
    """The shape of one program."""

    rows: int  # query rows
    keys: int  # per step of its loop
    warps: int
    stages: int  # of the pipeline
    registers: int | None = None  # most of a thread; None: as the compiler chooses


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rows: Tensor | None = None,
    order: Tensor | None = None,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    last_key: Tensor | None = None,
    out: Tensor | None = None,
    is_decode: bool = False,
) -> Tensor:
    """Attend causally from packed queries to cached keys and values, accumulated in fp32.

    q: `[num_tokens, num_heads, head_size]`; k_cache, v_cache: `[num_blocks, block_size,
    num_kv_heads, head_size]`; query_start_loc: int32 `[num_reqs + 1]`; seq_lens: int32
    `[num_reqs]`; block_table: int32 `[num_reqs, max_blocks]`, or `[num_rows, max_blocks]` with
    `rows`, int32 `[num_reqs]`, each request's row. q, the caches (alike) and out may be strided in
    all but their last dimension. q and out share a dtype. The caches have the same, or FP8: 16-bit
    queries are then multiplied as fp16, in which every e4m3 number is exact. See
    `reference.paged_attention`.

    `max_query_len` and `max_seq_len` are upper bounds. They shape the launch, not the result. A
    request without queries (padding) is skipped. Rows of `out` past the last request keep their
    values. is_decode: no request has a prompt; several queries then are a token and its drafts, and
    keys are split as for one. Each `max_query_len` has a kernel of its own. For order, in which
    decode starts requests, see `decode_attention`. last_key is for prompts: a request's only query
    sees up to itself, as do all with is_decode.

    NOTE: on Hopper the kernels read everything but q and the cache before the kernel ahead of them
    ends (see `pdl`): it must be older.

    Raises ValueError for dtypes that differ, heads that do not group evenly, a strided last
    dimension, and K and V caches with different strides."""
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch = Batch(
        q, k_cache, v_cache, query_start_loc, seq_lens, block_table, out, rows, order, last_key
    )
    batch.check()
    logits = Logits.of(scale, sliding_window, chunk, soft_cap, sinks, max_seq_len)
    splits = 1 if _is_short(batch, sliding_window) else num_splits(batch, max_seq_len)
    if max_query_len == 1 or (is_decode and _fits_decode(batch, max_query_len)):
        decode(batch, logits, splits, queries=max_query_len)
    elif batch.num_reqs > 1 and _multiple(batch) > 1 and max_seq_len > LONG_CONTEXT:
        decode(batch, logits, max(2, splits))
        prefill(batch, logits, singles=False)
    elif batch.num_reqs >= MANY_REQUESTS:
        decode(batch, logits, splits)
        prefill(batch, logits, singles=False)
    else:
        prefill(batch, logits, singles=True)
    return out


def decode_attention(
    qkv: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    rows: Tensor | None = None,
    order: Tensor | None = None,
    num_heads: int,
    max_seq_len: int,
    scale: float,
    sliding_window: int = 0,
    chunk: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    cos_sin: Tensor | None = None,
    q_cos_sin: Tensor | None = None,
    norm: HeadNorm | None = None,
    clip: float = 0.0,
    reads: bool = False,
) -> Tensor:
    """Compute `rotary.qk_norm_rope_write`, then `paged_attention`, for one token per request.

    Each token is the last of its request. One kernel does it all if the keys of a request are not
    split. See the two functions for arguments, and order: int32 `[num_reqs]`, a permutation of the
    requests. If not all run at once, they start in this order, best with the longest first. A
    token's own key and value are rounded to the cache's type. They count even without a slot, but
    with splits only with one. reads: qkv has queries alone, and the cache has all keys and values.

    NOTE: on Hopper the kernels read everything but qkv and the cache before the kernel ahead of
    them ends (see `pdl`): it must be older.

    Returns `[num_tokens, num_heads, head_size]`. Raises ValueError like the two functions."""
    num_tokens, head_size = qkv.shape[0], k_cache.shape[3]
    num_kv_heads = 0 if reads else k_cache.shape[2]
    if qkv.stride(1) != 1 or qkv.shape[1] != (num_heads + 2 * num_kv_heads) * head_size:
        raise ValueError(
            f"rows of {qkv.shape[1]} are not {num_heads} + 2 * {num_kv_heads} contiguous heads of "
            f"{head_size}"
        )
    q = qkv[:, : num_heads * head_size].view(num_tokens, num_heads, head_size)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch = Batch(q, k_cache, v_cache, query_start_loc, seq_lens, block_table, out, rows, order)
    batch.check()
    splits = 1 if _is_short(batch, sliding_window) else num_splits(batch, max_seq_len)
    own = None
    if reads or splits == 1:
        transform = Transform(cos_sin, q_cos_sin, norm, clip)
        transform.check(num_tokens, num_heads, num_kv_heads, head_size)
        own = Own(slot_mapping, transform, reads)
    else:
        q = qk_norm_rope_write(
            qkv,
            slot_mapping,
            k_cache,
            v_cache,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            cos_sin=cos_sin,
            q_cos_sin=q_cos_sin,
            norm=norm,
            clip=clip,
        )
        batch = batch._replace(q=q)
    logits = Logits.of(scale, sliding_window, chunk, soft_cap, sinks, max_seq_len)
    decode(batch, logits, splits, own)
    return out


class Batch(NamedTuple):
    """The tensors of one call."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    out: Tensor
    rows: Tensor | None = None  # each request's row in the block table; None: its index
    order: Tensor | None = None  # order in which requests start; None: by index
    last_key: Tensor | None = None  # [num_tokens], last key that a prompt's token sees

    @property
    def num_reqs(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.k_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[1] // self.num_kv_heads

    @property
    def programs_per_multiprocessor(self) -> float:
        """Programs per multiprocessor, with one for each request and KV head."""
        return self.num_reqs * self.num_kv_heads / _num_multiprocessors(self.q.device)

    @property
    def head_pad(self) -> int:
        """Head size, padded to a power of two and to the least size for tl.dot."""
        return max(16, power_of_two(self.q.shape[2]))

    def check(self) -> None:
        cached = self.k_cache.dtype
        dtypes = {self.q.dtype, cached, self.v_cache.dtype, self.out.dtype}
        if self.v_cache.dtype != cached or len(dtypes - {FP8} if cached == FP8 else dtypes) > 1:
            raise ValueError(
                f"q, the KV cache (unless it is in FP8) and out must share one dtype, not {dtypes}"
            )
        if self.q.shape[1] % self.num_kv_heads:
            raise ValueError(
                f"{self.q.shape[1]} heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if any(x.stride(-1) != 1 for x in (self.q, self.k_cache, self.v_cache, self.out)):
            raise ValueError("the last dimension of q, the KV cache and out must be contiguous")
        if self.k_cache.stride() != self.v_cache.stride():
            raise ValueError("the key and the value cache must have the same strides")

    def arguments(self) -> dict[str, object]:
        """Return arguments that all attention kernels have."""
        return {
            "q_ptr": self.q,
            "k_ptr": self.k_cache,
            "v_ptr": self.v_cache,
            "query_start_ptr": self.query_start_loc,
            "seq_len_ptr": self.seq_lens,
            "table_ptr": self.block_table,
            "row_ptr": self.seq_lens if self.rows is None else self.rows,
            "out_ptr": self.out,
            "q_stride_token": self.q.stride(0),
            "q_stride_head": self.q.stride(1),
            "kv_stride_block": self.k_cache.stride(0),
            "kv_stride_slot": self.k_cache.stride(1),
            "kv_stride_head": self.k_cache.stride(2),
            "table_stride": self.block_table.stride(0),
            "out_stride_token": self.out.stride(0),
            "out_stride_head": self.out.stride(1),
            "BLOCK_SIZE": self.k_cache.shape[1],
            "GROUP": self.group,
            "HEAD_SIZE": self.q.shape[2],
            "HEAD_PAD": self.head_pad,
            "INDIRECT": self.rows is not None,
        }


class Own(NamedTuple):
    """Slots and transform of the step's own heads. See `rotary`."""

    slot_mapping: Tensor
    transform: Transform = Transform()
    reads: bool = False  # there are queries alone

    def arguments(self, unused: Tensor) -> dict[str, object]:
        table = self.transform.cos_sin
        half = 0 if table is None else table.shape[2]
        own = {"slot_ptr": self.slot_mapping, "HALF": half, "READS": self.reads}
        return own | self.transform.arguments(unused)


class Logits(NamedTuple):
    """Transform of dot products into logits, the window or chunk, and the sinks."""

    scale: float
    sliding_window: int
    soft_cap: float
    sinks: Tensor | None = None  # fp32 [num_heads]
    chunk: int = 0

    @classmethod
    def of(
        cls,
        scale: float,
        sliding_window: int,
        chunk: int,
        soft_cap: float,
        sinks: Tensor | None,
        max_seq_len: int,
    ) -> Logits:
        """Leave out a chunk that has every context: other kernels are faster without one."""
        chunk = chunk if chunk < max_seq_len else 0
        return cls(scale, sliding_window, soft_cap, sinks, chunk)

    def arguments(self) -> dict[str, object]:
        """Return scales for a softmax in base 2. A soft cap uses tanh(x) = 2 * sigmoid(2x) - 1."""
        if self.soft_cap:
            inner, outer = 2 * self.scale / self.soft_cap, self.soft_cap * LOG2_E.value
        else:
            inner, outer = 1.0, self.scale * LOG2_E.value
        return {
            "inner_scale": inner,
            "outer_scale": outer,
            "window": self.chunk or self.sliding_window,
            "sinks_ptr": self.sinks,
            "SLIDING": self.chunk > 0 or self.sliding_window > 0,
            "CHUNKED": self.chunk > 0,
            "CAPPED": self.soft_cap > 0,
        }


def decode(
    batch: Batch,
    logits: Logits,
    splits: int,
    own: Own | None = None,
    tile: Tile | None = None,
    queries: int = 1,
) -> None:
    """Attend from requests with up to `queries` queries, by `splits` programs per KV head.

    With `own`, q is the step's qkv, of one query per request."""
    tile = tile or _decode_tile(batch, queries)
    ordered = batch.order is not None and batch.programs_per_multiprocessor > MAX_RESIDENT
    num_heads, head_size = batch.out.shape[1:]
    device = batch.q.device
    pdl = supported(device)
    parts = log_sums = batch.out
    if splits > 1:
        shape = (batch.num_reqs, queries * num_heads, splits)
        parts = torch.empty((*shape, head_size), dtype=torch.float32, device=device)
        log_sums = torch.empty(shape, dtype=torch.float32, device=device)
    decode_kernel[(batch.num_kv_heads, batch.num_reqs, splits)](
        **batch.arguments(),
        **logits.arguments(),
        **(own or Own(batch.seq_lens)).arguments(batch.q),
        order_ptr=batch.order if ordered else batch.seq_lens,
        part_ptr=parts,
        log_sum_ptr=log_sums,
        splits=splits,
        ROWS=tile.rows,
        KEYS=tile.keys,
        ORDERED=ordered,
        OWN=own is not None,
        SPLIT=splits > 1,
        PDL=pdl,
        launch_pdl=pdl,
        QUERIES=queries,
        num_warps=tile.warps,
        num_stages=tile.stages,
        maxnreg=tile.registers,
    )
    if splits > 1:
        merge_kernel[(num_heads, batch.num_reqs, queries)](
            parts,
            log_sums,
            batch.out,
            batch.query_start_loc,
            splits,
            *batch.out.stride()[:2],
            HEAD_SIZE=head_size,
            HEAD_PAD=batch.head_pad,
            SPLITS_PAD=power_of_two(splits),
            QUERIES=queries,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=8 if batch.head_pad > 256 else 4,
        )


def prefill(batch: Batch, logits: Logits, *, singles: bool, tile: Tile | None = None) -> None:
    """Attend from requests with several queries, and with `singles` also from those with one.

    With `tile`, the Triton kernel runs on any GPU."""
    if tile is None and _suits_hopper(batch, logits):
        _prefill_on_hopper(batch, logits, singles)
        return
    tile = tile or _prefill_tile(batch)
    tokens = tile.rows // batch.group
    # Tiles of request r begin at start[r] // tokens + r, which leaves one for every ragged end.
    num_tiles = batch.q.shape[0] // tokens + batch.num_reqs
    prefill_kernel[(num_tiles * batch.num_kv_heads,)](
        **batch.arguments(),
        **logits.arguments(),
        last_key_ptr=batch.last_key,
        num_reqs=batch.num_reqs,
        KV_HEADS=batch.num_kv_heads,
        singles=int(singles),  # not every version of the interpreter accepts a bool
        TOKENS=tokens,
        ROWS=tile.rows,
        KEYS=tile.keys,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def _suits_hopper(batch: Batch, logits: Logits) -> bool:
    """Return True if `attention_hopper` supports the call: causal attention of heads of 128.

    It copies pages as rows of one matrix, and the rest 16 bytes at a time, which Triton allows only
    if it knows that strides are divisible by 16."""
    cache = batch.k_cache
    block_size, num_kv_heads, head_size = cache.shape[1:]
    per_block, per_slot, per_head = cache.stride()[:3]
    return (
        is_hopper(batch.q.device)
        and batch.last_key is None
        and batch.q.element_size() == 2
        and cache.dtype in (batch.q.dtype, FP8)
        and head_size == 128
        and batch.group <= 128
        and not (logits.sliding_window or logits.chunk)
        and not (logits.soft_cap or logits.sinks is not None)
        and block_size >= 8
        and block_size & (block_size - 1) == 0
        and per_head == head_size
        and per_slot >= num_kv_heads * head_size
        and per_block % per_slot == 0
        and all(stride % 16 == 0 for stride in (*batch.q.stride()[:2], per_slot))
        and all(x.data_ptr() % 16 == 0 for x in (batch.q, cache, batch.v_cache))
    )


def _prefill_on_hopper(batch: Batch, logits: Logits, singles: bool) -> None:
    """Compute `prefill` by `attention_hopper`.

    Descriptors of the cache are made for each call: layers have their own, and small steps are
    replayed. Modules are imported here, since Triton for other GPUs may lack them."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from . import attention_hopper as hopper

    def rows(cache: Tensor) -> TensorDescriptor:
        """View slots as rows of a matrix, with rows of other tensors between blocks."""
        num_blocks, block_size, num_kv_heads, head_size = cache.shape
        num_rows = (num_blocks - 1) * (cache.stride(0) // cache.stride(1)) + block_size
        shape, strides = [num_rows, num_kv_heads * head_size], [cache.stride(1), 1]
        page = [min(block_size, hopper.KEYS.value), hopper.ROW_BYTES.value // cache.element_size()]
        layout = hopper.SWIZZLED_FP8 if cache.dtype == FP8 else hopper.SWIZZLED
        return TensorDescriptor(cache, shape, strides, page, layout.value)

    tokens = 2 * hopper.HALF.value // batch.group
    num_jobs = (batch.q.shape[0] // tokens + batch.num_reqs) * batch.num_kv_heads
    arguments = batch.arguments()
    del arguments["k_ptr"], arguments["HEAD_PAD"]
    hopper.hopper_prefill_kernel[(min(num_jobs, _num_multiprocessors(batch.q.device)),)](
        **arguments,
        counter_ptr=counters(
            batch.q.device, 2
        ),  # the next job, and the number of finished programs
        k_cache=rows(batch.k_cache),
        v_cache=rows(batch.v_cache),
        outer_scale=logits.arguments()["outer_scale"],
        num_jobs=num_jobs,
        num_reqs=batch.num_reqs,
        singles=int(singles),
        KV_HEADS=batch.num_kv_heads,
        TOKENS=tokens,
        num_warps=hopper.WARPS.value,
    )


def num_splits(batch: Batch, max_seq_len: int) -> int:
    """Return programs per request and KV head in decode: about two per multiprocessor.

    Each has at least one tile of keys."""
    return max(1, min(int(_multiple(batch) + 0.5), -(-max_seq_len // 64), MAX_SPLITS))


def _is_short(batch: Batch, window: int) -> bool:
    """Return True if one program reads a window's keys and values as fast as several, and a merge.

    Then decode writes the step's own keys in the same kernel, too."""
    row = 2 * batch.k_cache.shape[3] * batch.k_cache.dtype.itemsize
    return 0 < window * row <= SHORT_WINDOW


def _multiple(batch: Batch) -> float:
    """Return the factor from one program per request and KV head to two per multiprocessor."""
    return 2 / batch.programs_per_multiprocessor


@cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _fits_decode(batch: Batch, queries: int) -> bool:
    """Return True if one tile has all heads of a KV head and so many queries."""
    rows = queries * batch.group
    num_bytes = rows * batch.head_pad * batch.q.element_size()
    return rows <= MAX_DECODE_ROWS and num_bytes <= MAX_DECODE_BYTES


def _decode_tile(batch: Batch, queries: int) -> Tile:
    """Return the fastest tile for one query on an H200. See `--tune` of `tools.bench.kernels`.

    Of a tile of 128 rows, four warps spill registers on Hopper, and eight do not. Keys in FP8 are
    converted first: more programs of one warp hide it, where there are more. Eight rows take fewer
    instructions than 16, but only FP8 is bound by them."""
    itemsize = batch.k_cache.element_size()
    rows = max(8 if itemsize == 1 else 16, power_of_two(queries * batch.group))
    row_bytes = batch.head_pad * itemsize
    keys = min(64, max(16, 8192 // row_bytes))
    if batch.head_pad > 256:  # by what fits registers and 99 KB, not by time
        is_wide = rows > 16 or row_bytes > 1024
        return Tile(rows, keys, warps=8 if is_wide else 4, stages=2 if row_bytes > 1024 else 3)
    if rows <= 16 and row_bytes == 128 and batch.programs_per_multiprocessor > MAX_RESIDENT:
        registers = None if rows == 8 else 168
        return Tile(rows, keys=32, warps=1, stages=3, registers=registers)
    warps = 2 if rows <= 16 else 8 if rows > 64 and queries > 1 else 4
    return Tile(rows, keys, warps, stages=3 if row_bytes <= 256 else 4)


def _prefill_tile(batch: Batch) -> Tile:
    """Return a tile that fits twice on a multiprocessor: one computes while the other waits."""
    row_bytes = batch.head_pad * batch.q.element_size()
    if batch.head_pad > 256:
        most = 16384 // batch.head_pad // (batch.q.element_size() // 2)
        rows = max(most, power_of_two(batch.group))
        return Tile(rows, keys=most, warps=8 if rows > 16 else 4, stages=2)
    if row_bytes == 256 and batch.group <= 128:
        return Tile(128, 32, warps=4, stages=3)
    rows = max(64, power_of_two(batch.group))
    return Tile(rows, keys=min(64, max(16, 16384 // row_bytes)), warps=4, stages=3)
