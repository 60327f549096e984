"""Products of many tokens with experts in MXFP4, for Hopper GPUs.

A program multiplies 192 rows of an expert's weight by a block of 128 pairs. One group of warps
copies rows of x, and the weight's words and scales, into rings of stages in shared memory. Three
others convert 64 rows each into registers, from which the tensor cores read. No group waits for
another one, so one converts while the tensor cores multiply for the others; the warps of a Triton
kernel all convert at the same time, and then all multiply. Numbers are those of `up_kernel` and
`down_kernel`, which cover everything else.

Written in Gluon: `attention_hopper` describes it, and how barriers pass stages between groups."""

# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="attr-defined"
# Kernels annotate constexpr parameters only. Aggregates need annotations that are not strings.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from toolkit.kernels import mxfp4

from ..activation import gated
from ..barriers import barriers
from ..products.epilogue import side_by_side
from .expert_products import gated_row
from .mxfp4 import numbers
from .routing import FIELDS

PAIRS = gl.constexpr(128)
PART = gl.constexpr(64)  # rows of a group: the least for its products
PARTS = gl.constexpr(3)
ROWS = gl.constexpr(192)
STEP = gl.constexpr(mxfp4.STEP)  # columns
WORDS = gl.constexpr(mxfp4.GROUP)  # of a row, in a step
STAGES = gl.constexpr(4)
WARPS = gl.constexpr(4)  # of a group
# Registers per thread of multiplying groups and of the copying one: 128 * (3 * 144 + 80) are all.
REGISTERS, FEWER = gl.constexpr(144), gl.constexpr(80)

SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
IN_ORDER = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
SPREAD = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))  # over banks, for 8 rows at a time
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OPERAND = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]), 2)
)
# How the copying group's threads share tiles: 16 bytes each, or a row's scales.
COPIED_X = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
COPIED_WORDS = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
COPIED_SCALES = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@aggregate
class Shared:
    """Stages of x `[pairs, columns]`, and of words and scales, one for each part of a stage."""

    x: gl.shared_memory_descriptor
    words: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, x, words, scales, full, empty):
        self.x, self.words, self.scales, self.full, self.empty = x, words, scales, full, empty


@gluon.jit
def _row(lane, first_row, size, UP: gl.constexpr, INTERLEAVED: gl.constexpr):
    """Return the weight's row of a lane. Gate and up of an output are 8 lanes apart."""
    if UP:
        output = gl.minimum(first_row // 2 + lane // 16 * 8 + lane % 8, size - 1)
        row = gated_row(output, lane // 8 % 2, size, INTERLEAVED)
    else:
        row = gl.minimum(first_row + lane, size - 1)
    return row


@gluon.jit
def _copy_part(
    part: gl.constexpr,
    place,
    shared,
    words_ptr,
    scales_ptr,
    first_row,
    size,
    UP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    """Copy words and scales of a part of a step."""
    lane = part * PART + gl.arange(0, PART, layout=gl.SliceLayout(1, COPIED_WORDS))
    row = _row(lane, first_row, size, UP, INTERLEAVED)
    word = gl.arange(0, WORDS, layout=gl.SliceLayout(0, COPIED_WORDS))
    words = gl.expand_dims(row * WORDS, 1) + gl.expand_dims(word, 0)
    async_copy.async_copy_global_to_shared(shared.words.index(place), words_ptr + words)
    lane = part * PART + gl.arange(0, PART, layout=COPIED_SCALES)
    row = _row(lane, first_row, size, UP, INTERLEAVED)
    async_copy.async_copy_global_to_shared(shared.scales.index(place), scales_ptr + row)


@gluon.jit
def _copy(
    shared,
    x_ptr,
    pairs,
    weight,
    in_features,
    divisor: gl.constexpr,
    UP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
):
    """Fill the stages. Columns past the last one of x are zeros, and so are pairs past the last."""
    pair_ptr, count = pairs
    words_ptr, scales_ptr, step_rows, first_row, size = weight
    lane = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, COPIED_X))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, COPIED_X))
    live = gl.expand_dims(lane < count, 1)
    pair = gl.load(pair_ptr + lane, mask=lane < count, other=0)
    rows = gl.expand_dims(pair // divisor * in_features, 1)
    for n in range(gl.cdiv(in_features, STEP)):
        stage = n % STAGES
        mbarrier.wait(shared.empty.index(stage), n // STAGES % 2 ^ 1)
        at = gl.expand_dims(n * STEP + column, 0)
        mask = live & (at < in_features)
        async_copy.async_copy_global_to_shared(shared.x.index(stage), x_ptr + (rows + at), mask)
        for part in gl.static_range(PARTS):
            place = stage * PARTS + part
            _copy_part(part, place, shared, words_ptr, scales_ptr, first_row, size, UP, INTERLEAVED)
        async_copy.mbarrier_arrive(shared.full.index(stage), increment_count=False)
        words_ptr += step_rows * WORDS
        scales_ptr += step_rows


@gluon.jit
def _multiply(part: gl.constexpr, shared, out, in_features, gate: gl.constexpr):
    """Multiply a part of the rows by all pairs, and store what follows from it."""
    acc = gl.zeros([PART, PAIRS], gl.float32, SUMS)
    for n in range(gl.cdiv(in_features, STEP)):
        stage = n % STAGES
        place = stage * PARTS + part
        mbarrier.wait(shared.full.index(stage), n // STAGES % 2)
        fence_async_shared()
        words = shared.words.index(place).load(OPERAND)
        scales = shared.scales.index(place).load(gl.SliceLayout(1, OPERAND))
        a, b, c, d = numbers(words, gl.expand_dims(scales, 1))
        weight = side_by_side(side_by_side(a, b), side_by_side(c, d))
        x = shared.x.index(stage).permute((1, 0))
        sums = warpgroup_mma(gl.convert_layout(weight, OPERAND), x, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(sums,))
        mbarrier.arrive(shared.empty.index(stage), count=1)
    _store(acc, part * PART, out, gate)


@gluon.jit
def _store(acc, first: gl.constexpr, out, gate: gl.constexpr):
    """Add the bias, then gate, or weigh each pair, and store rows from `first` of the tile."""
    out_ptr, pair_ptr, count, bias_ptr, share_ptr, first_row, size = out
    UP: gl.constexpr = gate[0]
    lane = first + gl.arange(0, PART, layout=gl.SliceLayout(1, SUMS))
    if bias_ptr is not None:
        row = _row(lane, first_row, size, UP, gate[1])
        acc += gl.expand_dims(gl.load(bias_ptr + row).to(gl.float32), 1)
    if UP:
        halves = gl.permute(gl.reshape(acc, [PART // 16, 2, 8, PAIRS]), (0, 2, 3, 1))
        left, right = gl.split(halves)
        y = gl.reshape(gated(left, right, gate[2], gate[3], gate[4]), [PART // 2, PAIRS])
    else:
        lane = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, SUMS))
        pair = gl.load(pair_ptr + lane, mask=lane < count, other=0)
        share = gl.load(share_ptr + pair, mask=lane < count, other=0.0)
        y = acc * gl.expand_dims(share, 0)
    SHARE: gl.constexpr = 2 if UP else 1  # rows of an output
    COUNT: gl.constexpr = PART // SHARE
    STORED: gl.constexpr = gl.BlockedLayout(
        [8, 1], [COUNT // 8, 32 // (COUNT // 8)], [1, 4], [0, 1]
    )
    y = gl.convert_layout(y.to(out_ptr.dtype.element_ty), STORED)
    output = gl.arange(0, COUNT, layout=gl.SliceLayout(1, STORED)) + (first_row + first) // SHARE
    lane = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, STORED))
    pair = gl.load(pair_ptr + lane, mask=lane < count, other=0).to(gl.int64)
    places = gl.expand_dims(pair * size, 0) + gl.expand_dims(output, 1)
    mask = gl.expand_dims(output < size, 1) & gl.expand_dims(lane < count, 0)
    gl.store(out_ptr + places, y, mask=mask)


@gluon.jit(do_not_specialize=["num_tokens", "num_tiles"])
def hopper_experts_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    expert_rows,
    step_rows,
    table_ptr,
    pair_ptr,
    num_tokens,
    num_tiles,
    share_ptr,
    out_ptr,
    size,
    in_features,
    CHOSEN: gl.constexpr,
    UP: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    KIND: gl.constexpr,
    LIMIT: gl.constexpr,
    ALPHA: gl.constexpr,
):
    """Compute a tile of act(gate x) * up x if UP, else of what pairs add to their tokens.

    Tiles are in the order of `expert_kernels._place`. x has a row for each token if UP, else for
    each pair. `bias_ptr` may be None."""
    program = gl.program_id(0)
    entry = table_ptr + program // num_tiles * FIELDS
    expert = gl.load(entry).to(gl.int64)
    within = program - gl.load(entry + 1) * num_tiles
    blocks = gl.maximum(gl.load(entry + 2), 1)
    first_pair = within % blocks * PAIRS
    count = gl.load(entry + 3) - first_pair
    if count > 0:
        shared = Shared(
            x=gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAIRS, STEP], SWIZZLED),
            words=gl.allocate_shared_memory(gl.int16, [STAGES * PARTS, PART, WORDS], SPREAD),
            scales=gl.allocate_shared_memory(gl.int32, [STAGES * PARTS, PART], IN_ORDER),
            full=barriers(STAGES, 32 * WARPS),
            empty=barriers(STAGES, PARTS),
        )
        pair_ptr += expert * num_tokens + first_pair
        first_row = within // blocks * ROWS
        if bias_ptr is not None:
            bias_ptr += expert * (2 * size if UP else size)
        out = (out_ptr, pair_ptr, count, bias_ptr, share_ptr, first_row, size)
        words_ptr = weight_ptr + expert * expert_rows * WORDS
        weight = (words_ptr, scale_ptr + expert * expert_rows, step_rows, first_row, size)
        divisor: gl.constexpr = CHOSEN if UP else 1
        gate: gl.constexpr = (UP, INTERLEAVED, KIND, LIMIT, ALPHA)
        FIRST: gl.constexpr = 0
        SECOND: gl.constexpr = 1
        THIRD: gl.constexpr = 2
        copied = (shared, x_ptr, (pair_ptr, count), weight, in_features, divisor, UP, INTERLEAVED)
        gl.warp_specialize(
            [
                (_multiply, (FIRST, shared, out, in_features, gate)),
                (_multiply, (SECOND, shared, out, in_features, gate)),
                (_multiply, (THIRD, shared, out, in_features, gate)),
                (_copy, copied),
            ],
            [WARPS, WARPS, WARPS],
            [REGISTERS, REGISTERS, FEWER],
        )
