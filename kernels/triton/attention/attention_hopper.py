"""Prefill attention for Hopper GPUs, with concurrent copies, products and softmax.

Each multiprocessor runs one program of three warp groups. One group picks the next job (a tile of
queries and a KV head), and copies keys and values page by page into rings of tiles in shared
memory. It uses TMA, which needs no registers and few instructions. The other two compute half of
the job's rows each: their products are asynchronous, and the softmax of one runs while the tensor
cores multiply for the other. See Shah et al., "FlashAttention-3", arXiv:2407.08608.

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

# Keys of a tile. 128 are 5 % faster after 8,000 tokens, and 12 % slower for 1,000.
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(4)  # tiles in a ring: 1 << SHIFT
SHIFT = gl.constexpr(2)
HALF = gl.constexpr(64)  # rows per computing group: the least for its products
COLUMNS = gl.constexpr(64)  # per copy: 128 bytes, the swizzle of shared memory
WARPS = gl.constexpr(4)  # per computing group
REGISTERS = gl.constexpr(200)  # per thread of a computing group
# Registers per thread of the copying group. It has one warp, but is allotted four: 2 * 128 * 200 +
# 128 * 104 registers are all.
FEWER = gl.constexpr(104)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LOGITS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16]))


# Fields of a job
TILES = gl.constexpr(0)  # of keys; 0 ends the jobs
KV_HEAD = gl.constexpr(1)
FIRST_TOKEN = gl.constexpr(2)  # of the packed queries
QUERIES = gl.constexpr(3)  # remaining ones of the request; a job has at most a tile
FIRST_POSITION = gl.constexpr(4)  # of the first query, among the keys


@aggregate
class Shared:
    """Shared memory of the groups: queries, key and value tiles, jobs, and their barriers."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    jobs: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor
    job_full: gl.shared_memory_descriptor
    job_empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, jobs, q_full, k_full, k_empty, v_full, v_empty, job_full, job_empty
    ):
        self.q, self.k, self.v, self.jobs, self.q_full = q, k, v, jobs, q_full
        self.k_full, self.k_empty, self.v_full, self.v_empty = k_full, k_empty, v_full, v_empty
        self.job_full, self.job_empty = job_full, job_empty


@gluon.jit
def _wait(barriers, n):
    """Wait until tile n is ready."""
    mbarrier.wait(barriers.index(n & (STAGES - 1)), (n >> SHIFT) & 1)


@gluon.jit
def _wait_until_free(barriers, n):
    """Wait until the stage of tile n is free again."""
    mbarrier.wait(barriers.index(n & (STAGES - 1)), ((n >> SHIFT) & 1) ^ 1)


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
    full,
    n,
    cache,
    pages,
    block_rows,
    tile,
    column,
    BLOCK_SIZE: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
):
    """Copy keys or values as tile n. Pages are full: rows after the last key are undefined."""
    PAGES: gl.constexpr = pages.shape[0]
    PAGE: gl.constexpr = KEYS // PAGES
    stage = n & (STAGES - 1)
    mbarrier.expect(full.index(stage), KEYS * HEAD_SIZE * 2)
    for i in gl.static_range(PAGES):
        row = _at(pages, i) * block_rows + tile * KEYS % BLOCK_SIZE
        for part in gl.static_range(HEAD_SIZE // COLUMNS):
            place = ring.index(stage).slice(i * PAGE, PAGE, 0).slice(part * COLUMNS, COLUMNS, 1)
            tma.async_copy_global_to_shared(
                cache, [row, column + part * COLUMNS], full.index(stage), place
            )


@gluon.jit
def _copy(
    shared,
    counter_ptr,
    k_cache,
    v_cache,
    q_ptr,
    v_ptr,
    query_start_ptr,
    seq_len_ptr,
    table_ptr,
    row_ptr,
    q_stride_token,
    q_stride_head,
    kv_stride_block,
    kv_stride_slot,
    kv_stride_head,
    table_stride,
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
    """Copy job after job: fields, queries, and keys and values from the last tile to the first."""
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
            if INDIRECT:
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

            _wait_until_free(shared.k_empty, n)
            _copy_pages(
                shared.k,
                shared.k_full,
                n,
                k_cache,
                pages,
                block_rows,
                tile,
                column,
                BLOCK_SIZE,
                HEAD_SIZE,
            )
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
            stage = n & (STAGES - 1)
            _wait_until_free(shared.v_empty, n)
            place = shared.v.index(stage)
            v_rows = v_ptr + (gl.expand_dims(v_rows, 1) + dim)
            async_copy.async_copy_global_to_shared(place, v_rows, gl.expand_dims(live, 1))
            mbarrier.arrive(shared.v_full.index(stage), count=1)
            async_copy.mbarrier_arrive(shared.v_full.index(stage), increment_count=False)
            n += 1
            for below in range(tile - 1, -1, -1):
                pages = gl.load(table + (below * KEYS // BLOCK_SIZE + page))
                _wait_until_free(shared.k_empty, n)
                _copy_pages(
                    shared.k,
                    shared.k_full,
                    n,
                    k_cache,
                    pages,
                    block_rows,
                    below,
                    column,
                    BLOCK_SIZE,
                    HEAD_SIZE,
                )
                _wait_until_free(shared.v_empty, n)
                _copy_pages(
                    shared.v,
                    shared.v_full,
                    n,
                    v_cache,
                    pages,
                    block_rows,
                    below,
                    column,
                    BLOCK_SIZE,
                    HEAD_SIZE,
                )
                async_copy.mbarrier_arrive(
                    shared.v_full.index(n & (STAGES - 1)), increment_count=False
                )
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
        x, acc, row_max, row_sum, tile, last_key, outer_scale, shared.v.dtype, MASKED
    )
    now, ahead = n & (STAGES - 1), (n + 1) & (STAGES - 1)
    _wait(shared.k_full, n + 1)
    _wait(shared.v_full, n)
    if MASKED:
        fence_async_shared()
    zeros = gl.zeros([HALF, KEYS], gl.float32, LOGITS)
    k = shared.k.index(ahead).permute((1, 0))
    logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    result = warpgroup_mma(weight, shared.v.index(now), acc, is_async=True)
    x, acc = warpgroup_mma_wait(0, deps=(logits, result))
    mbarrier.arrive(shared.k_empty.index(ahead), count=1)
    mbarrier.arrive(shared.v_empty.index(now), count=1)
    return x, acc, row_max, row_sum


@gluon.jit
def _attend(
    half: gl.constexpr,
    shared,
    out_ptr,
    out_stride_token,
    out_stride_head,
    outer_scale,
    GROUP: gl.constexpr,
    HEAD_SIZE: gl.constexpr,
    TOKENS: gl.constexpr,
):
    """Attend from half of the rows of every job, as in `attention_kernels`."""
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
        stage = n & (STAGES - 1)
        mbarrier.wait(shared.q_full.index(slot), (t >> 1) & 1)
        _wait(shared.k_full, n)
        fence_async_shared()
        zeros = gl.zeros([HALF, KEYS], gl.float32, LOGITS)
        k = shared.k.index(stage).permute((1, 0))
        logits = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(0, deps=(logits,))
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
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
            x, acc, row_max, row_sum, 0, last_key, outer_scale, shared.v.dtype, True
        )
        mbarrier.arrive(shared.job_empty.index(slot), count=1)
        stage = n & (STAGES - 1)
        _wait(shared.v_full, n)
        fence_async_shared()
        result = warpgroup_mma(weight, shared.v.index(stage), acc, is_async=True)
        share = gl.convert_layout(
            1 / gl.maximum(gl.sum(row_sum, 1), 1e-30), gl.SliceLayout(1, RESULT)
        )
        acc = warpgroup_mma_wait(0, deps=(result,))
        mbarrier.arrive(shared.v_empty.index(stage), count=1)

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
def _barriers(N: gl.constexpr, count: gl.constexpr):
    barriers = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(barriers.index(i), count=count)
    return barriers


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
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    # Arrivals: at `empty`, one of each computing group. At `full`, one that announces bytes or
    # writes fields, and one of each of the 32 threads that copy themselves.
    shared = Shared(
        q=gl.allocate_shared_memory(dtype, [4, HALF, HEAD_SIZE], SWIZZLED),
        k=gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], SWIZZLED),
        v=gl.allocate_shared_memory(dtype, [STAGES, KEYS, HEAD_SIZE], SWIZZLED),
        jobs=gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        q_full=_barriers(2, 32),
        k_full=_barriers(STAGES, 1),
        k_empty=_barriers(STAGES, 2),
        v_full=_barriers(STAGES, 1 + 32),
        v_empty=_barriers(STAGES, 2),
        job_full=_barriers(2, 1),
        job_empty=_barriers(2, 2),
    )
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    FIRST,
                    shared,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    outer_scale,
                    GROUP,
                    HEAD_SIZE,
                    TOKENS,
                ),
            ),
            (
                _attend,
                (
                    SECOND,
                    shared,
                    out_ptr,
                    out_stride_token,
                    out_stride_head,
                    outer_scale,
                    GROUP,
                    HEAD_SIZE,
                    TOKENS,
                ),
            ),
            (
                _copy,
                (
                    shared,
                    counter_ptr,
                    k_cache,
                    v_cache,
                    q_ptr,
                    v_ptr,
                    query_start_ptr,
                    seq_len_ptr,
                    table_ptr,
                    row_ptr,
                    q_stride_token,
                    q_stride_head,
                    kv_stride_block,
                    kv_stride_slot,
                    kv_stride_head,
                    table_stride,
                    num_jobs,
                    num_reqs,
                    singles,
                    BLOCK_SIZE,
                    GROUP,
                    KV_HEADS,
                    HEAD_SIZE,
                    INDIRECT,
                    TOKENS,
                ),
            ),
        ],
        [WARPS, 1],
        [REGISTERS, FEWER],
    )
