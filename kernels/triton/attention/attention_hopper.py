"""Prefill attention for Hopper GPUs, with concurrent copies, products and softmax.

Each multiprocessor runs one program of three warp groups. One group picks the next job (a tile of
queries and a KV head), and copies keys and values page by page into rings of tiles in shared
memory. It uses TMA, which needs no registers and few instructions. The other two compute half of
the job's rows each: their products are asynchronous, and the softmax of one runs while the tensor
cores multiply for the other. See Shah et al., "FlashAttention-3", arXiv:2407.08608.

A fourth group converts keys and values in FP8, from rings of their own, and queries to fp16, in
which every e4m3 number is exact.

It is written in Gluon, the language below Triton, where a kernel controls layouts, barriers and
warp groups. Gluon has no interpreter, so this runs on GPUs only; `prefill_kernel` of
`attention_kernels` covers everything else.

Barriers pass ring stages and job slots between the groups. Their phase alternates with each use: a
program's tile n is in stage n % STAGES of its ring, and is ready once the stage's `full` has
completed phase n // STAGES. Job t uses slot t % 2 in the same way."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined"
# Kernels annotate constexpr parameters only. Aggregates need annotations that are not strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from ..barriers import barriers

# Keys of a tile. 128 are 5 % faster after 8,000 tokens, and 12 % slower for 1,000.
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(4)  # tiles in a ring
COPIED_STAGES = gl.constexpr(2)  # tiles in a ring of FP8
HALF = gl.constexpr(64)  # rows per computing group: the least for its products
ROW_BYTES = gl.constexpr(128)  # per copy: the swizzle of shared memory
WARPS = gl.constexpr(4)  # per computing group
REGISTERS = gl.constexpr(200)  # per thread of a computing group
# Registers per thread of the copying group. It has one warp, but is allotted four: 2 * 128 * 200 +
# 128 * 104 registers are all.
FEWER = gl.constexpr(104)
# Both with a group that converts, of four warps: 128 * (2 * 200 + 32 + 80) are all.
FEWEST, CONVERTING = gl.constexpr(32), gl.constexpr(80)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
SWIZZLED_FP8 = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))
BYTES = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))  # of a tile in FP8

# Fields of a job
TILES = gl.constexpr(0)  # of keys; 0 ends the jobs
KV_HEAD = gl.constexpr(1)
FIRST_TOKEN = gl.constexpr(2)  # of the packed queries
QUERIES = gl.constexpr(3)  # remaining ones of the request; a job has at most a tile
FIRST_POSITION = gl.constexpr(4)  # of the first query, among the keys


@aggregate
class Ring:
    """Tiles in shared memory, with a `full` and an `empty` barrier for each stage."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty):
        self.tiles, self.full, self.empty = tiles, full, empty


@aggregate
class Shared:
    """Shared memory of the groups: queries, key and value tiles, jobs, and their barriers.

    The copied rings are k and v themselves, unless these are converted from them."""

    q: gl.shared_memory_descriptor
    k: Ring
    v: Ring
    copied_k: Ring
    copied_v: Ring
    jobs: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    job_full: gl.shared_memory_descriptor
    job_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, q, k, v, copied_k, copied_v, jobs, q_full, job_full, job_empty):
        self.q, self.k, self.v, self.copied_k, self.copied_v = q, k, v, copied_k, copied_v
        self.jobs, self.q_full = jobs, q_full
        self.job_full, self.job_empty = job_full, job_empty


@aggregate
class Shape:
    """Sizes that kernels are compiled for."""

    BLOCK_SIZE: gl.constexpr
    GROUP: gl.constexpr
    KV_HEADS: gl.constexpr
    HEAD_SIZE: gl.constexpr
    INDIRECT: gl.constexpr
    TOKENS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, BLOCK_SIZE, GROUP, KV_HEADS, HEAD_SIZE, INDIRECT, TOKENS):
        self.BLOCK_SIZE, self.GROUP = gl.constexpr(BLOCK_SIZE), gl.constexpr(GROUP)
        self.KV_HEADS, self.HEAD_SIZE = gl.constexpr(KV_HEADS), gl.constexpr(HEAD_SIZE)
        self.INDIRECT, self.TOKENS = gl.constexpr(INDIRECT), gl.constexpr(TOKENS)


@gluon.jit
def _stage(ring, n):
    """Return the stage of tile n."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    return n & (STAGES - 1)


@gluon.jit
def _wait(ring, n):
    """Wait until tile n is ready."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.full.index(n & (STAGES - 1)), (n // STAGES) & 1)


@gluon.jit
def _wait_until_free(ring, n):
    """Wait until the stage of tile n is free again."""
    STAGES: gl.constexpr = ring.tiles.shape[0]
    mbarrier.wait(ring.empty.index(n & (STAGES - 1)), ((n // STAGES) & 1) ^ 1)


@gluon.jit
def _free(ring, n):
    """Let the stage of tile n be overwritten, once all readers have called this."""
    mbarrier.arrive(ring.empty.index(_stage(ring, n)), count=1)


@gluon.jit
def _at(values, i: gl.constexpr):
    """Return element i of values that every thread holds."""
    N: gl.constexpr = values.shape[0]
    return gl.sum(gl.where(gl.arange(0, N, layout=values.type.layout) == i, values, 0), 0)


@gluon.jit
def _request_of_tile(query_start_ptr, tile, num_reqs, TOKENS: gl.constexpr):
    """Return the request of a tile, as in `attention_kernels`."""
    LANES: gl.constexpr = gl.BlockedLayout([8], [32], [gl.num_warps()], [0])
    not_after = 0
    for base in range(0, num_reqs, 256):
        request = base + gl.arange(0, 256, layout=LANES)
        start = gl.load(query_start_ptr + request, mask=request < num_reqs, other=0)
        first_tile = start // TOKENS + request
        not_after += gl.sum(((request < num_reqs) & (first_tile <= tile)).to(gl.int32), 0)
    return not_after - 1


@gluon.jit
def _copy_pages(
    ring,
    n,
    cache,
    pages,
    block_rows,
    tile,
    column,
    BLOCK_SIZE: gl.constexpr,
):
    """Copy keys or values as tile n. Pages are full: rows after the last key are undefined."""
    PAGES: gl.constexpr = pages.shape[0]
    PAGE: gl.constexpr = KEYS // PAGES
    HEAD_SIZE: gl.constexpr = ring.tiles.shape[2]
    BYTES: gl.constexpr = ring.tiles.dtype.primitive_bitwidth // 8
    COLUMNS: gl.constexpr = ROW_BYTES // BYTES
    _wait_until_free(ring, n)
    full = ring.full.index(_stage(ring, n))
    mbarrier.expect(full, KEYS * HEAD_SIZE * BYTES)
    for i in gl.static_range(PAGES):
        row = _at(pages, i) * block_rows + tile * KEYS % BLOCK_SIZE
        for part in gl.static_range(HEAD_SIZE // COLUMNS):
            place = ring.tiles.index(_stage(ring, n))
            place = place.slice(i * PAGE, PAGE, 0).slice(part * COLUMNS, COLUMNS, 1)
            tma.async_copy_global_to_shared(cache, [row, column + part * COLUMNS], full, place)


@gluon.jit
def _copy(shared, queries, caches, requests, jobs, shape):
    """Copy job after job: fields, queries, and keys and values from the last tile to the first."""
    BLOCK_SIZE: gl.constexpr = shape.BLOCK_SIZE
    GROUP: gl.constexpr = shape.GROUP
    KV_HEADS: gl.constexpr = shape.KV_HEADS
    HEAD_SIZE: gl.constexpr = shape.HEAD_SIZE
    TOKENS: gl.constexpr = shape.TOKENS
    q_ptr, q_stride_token, q_stride_head = queries
    k_cache, v_cache, v_ptr, kv_stride_block, kv_stride_slot, kv_stride_head = caches
    query_start_ptr, seq_len_ptr, num_reqs, table_ptr, table_stride, row_ptr = requests
    counter_ptr, num_jobs, singles = jobs
    CONVERTED: gl.constexpr = shared.copied_k.tiles.dtype == gl.float8e4nv
    PAGES: gl.constexpr = KEYS // BLOCK_SIZE if BLOCK_SIZE < KEYS else 1
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [1, 1], [1, 0])
    page = gl.arange(0, PAGES, layout=gl.BlockedLayout([PAGES], [32], [1], [0]))
    field = gl.arange(0, 8, layout=gl.BlockedLayout([8], [32], [1], [0]))
    dim = gl.expand_dims(gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, ROWS)), 0)
    n = 0
    t = 0
    job = gl.program_id(0)
    while job < num_jobs:
        kv_head = job % KV_HEADS
        query_tile = (num_jobs - 1 - job) // KV_HEADS
        request = _request_of_tile(query_start_ptr, query_tile, num_reqs, TOKENS)
        query_start = gl.load(query_start_ptr + request)
        query_len = gl.load(query_start_ptr + request + 1) - query_start
        context = gl.load(seq_len_ptr + request) - query_len
        first_query = (query_tile - query_start // TOKENS - request) * TOKENS
        if (first_query < query_len) & ((query_len > 1) | (singles != 0)):
            table_row = request.to(gl.int64)
            if shape.INDIRECT:
                table_row = gl.load(row_ptr + request).to(gl.int64)
            table = table_ptr + table_row * table_stride
            block_rows = (kv_stride_block // kv_stride_slot).to(gl.int32)
            column = kv_head * HEAD_SIZE
            last = context + gl.minimum(first_query + TOKENS, query_len) - 1
            some = gl.maximum(last, 0)  # without a context: a tile of zeros
            tile = some // KEYS
            pages = gl.load(
                table + gl.minimum(tile * KEYS // BLOCK_SIZE + page, some // BLOCK_SIZE)
            )

            slot = t & 1
            mbarrier.wait(shared.job_empty.index(slot), ((t >> 1) & 1) ^ 1)
            numbers = gl.where(field == TILES, tile + 1, 0)
            numbers = gl.where(field == KV_HEAD, kv_head, numbers)
            numbers = gl.where(field == FIRST_TOKEN, query_start + first_query, numbers)
            numbers = gl.where(field == QUERIES, query_len - first_query, numbers)
            numbers = gl.where(field == FIRST_POSITION, context + first_query, numbers)
            shared.jobs.index(slot).store(numbers)
            mbarrier.arrive(shared.job_full.index(slot), count=1)

            _copy_pages(shared.copied_k, n, k_cache, pages, block_rows, tile, column, BLOCK_SIZE)
            if CONVERTED:
                _copy_pages(
                    shared.copied_v, n, v_cache, pages, block_rows, tile, column, BLOCK_SIZE
                )
            else:
                for half in gl.static_range(2):
                    row = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS))
                    token = query_start + gl.minimum(first_query + row // GROUP, query_len - 1)
                    q_rows = (
                        token.to(gl.int64) * q_stride_token
                        + (kv_head * GROUP + row % GROUP) * q_stride_head
                    )
                    place = shared.q.index(slot * 2 + half)
                    async_copy.async_copy_global_to_shared(
                        place, q_ptr + (gl.expand_dims(q_rows, 1) + dim)
                    )
                async_copy.mbarrier_arrive(shared.q_full.index(slot), increment_count=False)
                # Values after the last key may be NaN, and zero times NaN is NaN. So this tile is
                # copied by rows instead of pages, with zeros after the last key.
                position = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, ROWS))
                live = position <= last
                block = gl.load(table + position // BLOCK_SIZE, mask=live, other=0).to(gl.int64)
                v_rows = block * kv_stride_block + position % BLOCK_SIZE * kv_stride_slot
                v_rows += kv_head.to(gl.int64) * kv_stride_head
                _wait_until_free(shared.v, n)
                v_rows = v_ptr + (gl.expand_dims(v_rows, 1) + dim)
                async_copy.async_copy_global_to_shared(
                    shared.v.tiles.index(_stage(shared.v, n)), v_rows, gl.expand_dims(live, 1)
                )
                full = shared.v.full.index(_stage(shared.v, n))
                mbarrier.arrive(full, count=1)
                async_copy.mbarrier_arrive(full, increment_count=False)
            n += 1
            for below in range(tile - 1, -1, -1):
                pages = gl.load(table + (below * KEYS // BLOCK_SIZE + page))
                _copy_pages(
                    shared.copied_k, n, k_cache, pages, block_rows, below, column, BLOCK_SIZE
                )
                _copy_pages(
                    shared.copied_v, n, v_cache, pages, block_rows, below, column, BLOCK_SIZE
                )
                if not CONVERTED:
                    full = shared.v.full.index(_stage(shared.v, n))
                    async_copy.mbarrier_arrive(full, increment_count=False)
                n += 1
            t += 1
        # Each program starts with its own job; the others are claimed.
        job = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
    mbarrier.wait(shared.job_empty.index(t & 1), ((t >> 1) & 1) ^ 1)
    shared.jobs.index(t & 1).store(field * 0)
    mbarrier.arrive(shared.job_full.index(t & 1), count=1)
    # The last program resets the counters.
    if gl.atomic_add(counter_ptr + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter_ptr, 0)
        gl.store(counter_ptr + 1, 0)


@gluon.jit
def _convert_tile(copied, ring, n, live=None):
    """Convert tile n to the type of `ring`, with zeros in rows that are not `live`."""
    _wait(copied, n)
    x = copied.tiles.index(_stage(copied, n)).load(BYTES).to(ring.tiles.dtype)
    if live is not None:
        x = gl.where(gl.expand_dims(live, 1), x, gl.zeros_like(x))
    _wait_until_free(ring, n)
    ring.tiles.index(_stage(ring, n)).store(x)
    fence_async_shared()  # also between the loads above and the copy that follows `_free`
    _free(copied, n)
    mbarrier.arrive(ring.full.index(_stage(ring, n)), count=1)


@gluon.jit
def _convert(shared, queries, shape):
    """Convert the queries, keys and values of every job, in the order in which they are copied."""
    GROUP: gl.constexpr = shape.GROUP
    HEAD_SIZE: gl.constexpr = shape.HEAD_SIZE
    TOKENS: gl.constexpr = shape.TOKENS
    q_ptr, q_stride_token, q_stride_head = queries
    NUMBERS: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    dim = gl.expand_dims(gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, ROWS)), 0)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(1, BYTES))
    n = 0
    t = 0
    mbarrier.wait(shared.job_full.index(0), 0)
    numbers = shared.jobs.index(0).load(NUMBERS)
    tiles = _at(numbers, TILES)
    while tiles > 0:
        kv_head = _at(numbers, KV_HEAD)
        first_token = _at(numbers, FIRST_TOKEN)
        num_queries = gl.minimum(_at(numbers, QUERIES), TOKENS)
        first_position = _at(numbers, FIRST_POSITION)
        slot = t & 1
        for half in gl.static_range(2):
            row = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, ROWS))
            token = first_token + gl.minimum(row // GROUP, num_queries - 1)
            q_rows = (
                token.to(gl.int64) * q_stride_token
                + (kv_head * GROUP + row % GROUP) * q_stride_head
            )
            q = gl.load(q_ptr + (gl.expand_dims(q_rows, 1) + dim))
            shared.q.index(slot * 2 + half).store(q.to(shared.q.dtype))
        fence_async_shared()
        mbarrier.arrive(shared.q_full.index(slot), count=1)
        # Values after the last key may be NaN, and zero times NaN is NaN.
        live = (tiles - 1) * KEYS + key < first_position + num_queries
        _convert_tile(shared.copied_k, shared.k, n)
        _convert_tile(shared.copied_v, shared.v, n, live)
        n += 1
        for _ in range(1, tiles):
            _convert_tile(shared.copied_k, shared.k, n)
            _convert_tile(shared.copied_v, shared.v, n)
            n += 1
        mbarrier.arrive(shared.job_empty.index(slot), count=1)
        t += 1
        mbarrier.wait(shared.job_full.index(t & 1), (t >> 1) & 1)
        numbers = shared.jobs.index(t & 1).load(NUMBERS)
        tiles = _at(numbers, TILES)


@gluon.jit
def _weigh(
    x, acc, row_max, row_sum, tile, last_key, outer_scale, dtype: gl.constexpr, MASKED: gl.constexpr
):
    """Turn a tile's logits into weights, a product's first operand. Rescale the sums so far.

    row_sum `[rows, 8]` is of the columns that each thread holds: the threads of a row add theirs up
    once per job."""
    RESULT: gl.constexpr = acc.type.layout
    if MASKED:
        position = tile * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, LOGITS))
        x = gl.where(gl.expand_dims(position, 0) <= gl.expand_dims(last_key, 1), x, -float("inf"))
    top = gl.max(gl.max(gl.reshape(x, [HALF, KEYS // 8, 8]), 1), 1)
    new_max = gl.maximum(row_max, gl.convert_layout(top, gl.SliceLayout(1, LOGITS)) * outer_scale)
    weight = gl.exp2(x * outer_scale - gl.expand_dims(new_max, 1))
    decay = gl.exp2(row_max - new_max)
    part = gl.convert_layout(gl.sum(gl.reshape(weight, [HALF, KEYS // 8, 8]), 1), SUMS)
    row_sum = row_sum * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, SUMS)), 1) + part
    acc = acc * gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, RESULT)), 1)
    return (
        gl.convert_layout(weight.to(dtype), gl.DotOperandLayout(0, RESULT, 2)),
        acc,
        new_max,
        row_sum,
    )


@gluon.jit
def _fold(
    shared, q, x, acc, row_max, row_sum, tile, n, last_key, outer_scale, MASKED: gl.constexpr
):
    """Multiply the weights of `tile` by its values, tile n, and compute the next tile's logits."""
    weight, acc, row_max, row_sum = _weigh(
        x, acc, row_max, row_sum, tile, last_key, outer_scale, shared.q.dtype, MASKED
    )
    _wait(shared.k, n + 1)
    _wait(shared.v, n)
    if MASKED:
        fence_async_shared()
    zeros = gl.zeros([HALF, KEYS], gl.float32, LOGITS)
    k = shared.k.tiles.index(_stage(shared.k, n + 1)).permute((1, 0))
    v = shared.v.tiles.index(_stage(shared.v, n))
    logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    result = warpgroup_mma(weight, v, acc, is_async=True)
    x, acc = warpgroup_mma_wait(0, deps=(logits, result))
    _free(shared.k, n + 1)
    _free(shared.v, n)
    return x, acc, row_max, row_sum


@gluon.jit
def _attend(half: gl.constexpr, shared, outs, shape):
    """Attend from half of the rows of every job, as in `attention_kernels`."""
    GROUP: gl.constexpr = shape.GROUP
    HEAD_SIZE: gl.constexpr = shape.HEAD_SIZE
    TOKENS: gl.constexpr = shape.TOKENS
    out_ptr, out_stride_token, out_stride_head, outer_scale = outs
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_SIZE, 16])
    NUMBERS: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    dim = gl.expand_dims(gl.arange(0, HEAD_SIZE, layout=gl.SliceLayout(0, RESULT)), 0)
    row = half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, RESULT))
    n = 0
    t = 0
    mbarrier.wait(shared.job_full.index(0), 0)
    numbers = shared.jobs.index(0).load(NUMBERS)
    tiles = _at(numbers, TILES)
    while tiles > 0:
        kv_head = _at(numbers, KV_HEAD)
        first_token = _at(numbers, FIRST_TOKEN)
        num_queries = _at(numbers, QUERIES)
        first_position = _at(numbers, FIRST_POSITION)
        query = (half * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, LOGITS))) // GROUP
        last_key = first_position + query
        row_max = gl.full([HALF], -1e30, gl.float32, gl.SliceLayout(1, LOGITS))
        row_sum = gl.zeros([HALF, 8], gl.float32, SUMS)
        acc = gl.zeros([HALF, HEAD_SIZE], gl.float32, RESULT)

        slot = t & 1
        q = shared.q.index(slot * 2 + half)
        mbarrier.wait(shared.q_full.index(slot), (t >> 1) & 1)
        _wait(shared.k, n)
        fence_async_shared()
        zeros = gl.zeros([HALF, KEYS], gl.float32, LOGITS)
        k = shared.k.tiles.index(_stage(shared.k, n)).permute((1, 0))
        logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=(logits,))
        _free(shared.k, n)
        tile = tiles - 1
        # All rows see all keys of the tiles below this one, so they need no masks. The first tile
        # has them anyway: threads copied its values, which products may read only after a fence,
        # and the fence comes with the masks.
        seen = gl.minimum((first_position + 1) // KEYS, tile)
        while tile >= gl.maximum(seen, 1):
            x, acc, row_max, row_sum = _fold(
                shared, q, x, acc, row_max, row_sum, tile, n, last_key, outer_scale, True
            )
            tile -= 1
            n += 1
        while tile >= 1:
            x, acc, row_max, row_sum = _fold(
                shared, q, x, acc, row_max, row_sum, tile, n, last_key, outer_scale, False
            )
            tile -= 1
            n += 1
        weight, acc, row_max, row_sum = _weigh(
            x, acc, row_max, row_sum, 0, last_key, outer_scale, shared.q.dtype, True
        )
        mbarrier.arrive(shared.job_empty.index(slot), count=1)
        _wait(shared.v, n)
        fence_async_shared()
        v = shared.v.tiles.index(_stage(shared.v, n))
        result = warpgroup_mma(weight, v, acc, is_async=True)
        share = gl.convert_layout(
            1 / gl.maximum(gl.sum(row_sum, 1), 1e-30), gl.SliceLayout(1, RESULT)
        )
        acc = warpgroup_mma_wait(0, deps=(result,))
        _free(shared.v, n)

        token = (first_token + row // GROUP).to(gl.int64)
        out_rows = token * out_stride_token + (kv_head * GROUP + row % GROUP) * out_stride_head
        stored = (row // GROUP < num_queries) & (row < TOKENS * GROUP)
        result = (acc * gl.expand_dims(share, 1)).to(out_ptr.dtype.element_ty)
        gl.store(
            out_ptr + (gl.expand_dims(out_rows, 1) + dim), result, mask=gl.expand_dims(stored, 1)
        )
        n += 1
        t += 1
        mbarrier.wait(shared.job_full.index(t & 1), (t >> 1) & 1)
        numbers = shared.jobs.index(t & 1).load(NUMBERS)
        tiles = _at(numbers, TILES)


@gluon.jit
def _ring(
    STAGES: gl.constexpr,
    dtype: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    LAYOUT: gl.constexpr,
    filling: gl.constexpr,
    reading: gl.constexpr,
):
    """Return an empty ring, whose tiles so many threads fill and so many groups read."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], LAYOUT)
    return Ring(tiles, barriers(STAGES, filling), barriers(STAGES, reading))


@gluon.jit(do_not_specialize=["num_jobs", "num_reqs", "singles"])
def hopper_prefill_kernel(
    counter_ptr,
    k_cache,
    v_cache,
    q_ptr,
    v_ptr,
    query_start_ptr,
    seq_len_ptr,
    table_ptr,
    row_ptr,
    out_ptr,
    q_stride_token,
    q_stride_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
    out_stride_token,
    out_stride_head,
    outer_scale,
    num_jobs,
    num_reqs,
    singles,
    BLOCK_SIZE: gl.constexpr,
    GROUP: gl.constexpr,
    KV_HEADS: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    INDIRECT: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Run jobs from the last tile of the last prompt down: last tiles have the most keys."""
    CONVERTED: gl.constexpr = v_ptr.dtype.element_ty == gl.float8e4nv
    dtype: gl.constexpr = gl.float16 if CONVERTED else q_ptr.dtype.element_ty
    # Arrivals: at `empty`, one of each reading group. At `full`, one that announces bytes or writes
    # fields, and one of each of the 32 threads that copy themselves. A converting group reads jobs,
    # and alone fills what products read.
    COPYING: gl.constexpr = 0 if CONVERTED else 32
    k = _ring(STAGES, dtype, HEAD_SIZE, SWIZZLED, 1, 2)
    v = _ring(STAGES, dtype, HEAD_SIZE, SWIZZLED, 1 + COPYING, 2)
    copied_k = k
    copied_v = v
    if CONVERTED:
        copied_k = _ring(COPIED_STAGES, gl.float8e4nv, HEAD_SIZE, SWIZZLED_FP8, 1, 1)
        copied_v = _ring(COPIED_STAGES, gl.float8e4nv, HEAD_SIZE, SWIZZLED_FP8, 1, 1)
    shared = Shared(
        q=gl.allocate_shared_memory(dtype, [4, HALF, HEAD_SIZE], SWIZZLED),
        k=k,
        v=v,
        copied_k=copied_k,
        copied_v=copied_v,
        jobs=gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        q_full=barriers(2, 1 if CONVERTED else 32),
        job_full=barriers(2, 1),
        job_empty=barriers(2, 3 if CONVERTED else 2),
    )
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    outs = (out_ptr, out_stride_token, out_stride_head, outer_scale)
    queries = (q_ptr, q_stride_token, q_stride_head)
    caches = (k_cache, v_cache, v_ptr, kv_stride_block, kv_stride_slot, kv_stride_head)
    requests = (query_start_ptr, seq_len_ptr, num_reqs, table_ptr, table_stride, row_ptr)
    jobs = (counter_ptr, num_jobs, singles)
    shape = Shape(BLOCK_SIZE, GROUP, KV_HEADS, HEAD_SIZE, INDIRECT, TOKENS)
    if CONVERTED:
        gl.warp_specialize(
            [
                (_attend, (FIRST, shared, outs, shape)),
                (_attend, (SECOND, shared, outs, shape)),
                (_copy, (shared, queries, caches, requests, jobs, shape)),
                (_convert, (shared, queries, shape)),
            ],
            [WARPS, 1, WARPS],
            [REGISTERS, FEWEST, CONVERTING],
        )
    else:
        gl.warp_specialize(
            [
                (_attend, (FIRST, shared, outs, shape)),
                (_attend, (SECOND, shared, outs, shape)),
                (_copy, (shared, queries, caches, requests, jobs, shape)),
            ],
            [WARPS, 1],
            [REGISTERS, FEWER],
        )
