"""Kernels of `experts` of one token, multiplied in registers by all its experts at once.

A tile is [rows, choices, columns]. Threads load 16 bytes of each of its rows: CHUNK adjacent
numbers in 16 bits, or words of 32 bits. A word has 4 adjacent numbers of FP8, or of each plane of
integers or MXFP4 2 (`grouped_layout`, `kernels.mxfp4`). So that no number moves between threads, x
is loaded in PARTS, CHUNK columns for each thread: a step of a row has PARTS times RUN columns, and
part n of a tile has the nth RUN of each step.

Integers become digits of a power of two in fp32, which is then subtracted from the sums."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated
from .expert_products import first_rows, gated_row
from .fp8 import INTERPRETED, unpacked
from .grouped import load_groups
from .matmul import BLOCK
from .pdl import release, wait

CHUNK = tl.constexpr(8)


@triton.jit
def _load_tile(
    rows,
    scales,
    offsets,
    step_rows,
    start,
    live,
    in_features,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Return (numbers or words, scales of groups or blocks, offsets) from column `start` on.

    rows, scales, offsets: pointers `[rows, choices, 1]` to those of each row's first column."""
    SUMS: tl.constexpr = COLUMNS // PARTS // CHUNK
    chunk = tl.arange(0, SUMS)[None, None, :]
    scale = (0.0, 0.0, 0.0, 0.0)
    offset = (0.0, 0.0, 0.0, 0.0)
    if FORMAT == "plain":
        at = start + tl.max_contiguous(tl.arange(0, COLUMNS)[None, None, :], [1, 1, CHUNK])
        inside = live & (at < in_features)
    elif FORMAT == "integers" or FORMAT == "mxfp4":
        WORDS: tl.constexpr = RUN // 2  # of a row, in a step
        num_steps = tl.cdiv(in_features, RUN * PARTS)
        word = tl.arange(0, COLUMNS // PARTS // 2)[None, None, :]
        step = start // (RUN * PARTS) + word // WORDS
        at = step.to(tl.int64) * (step_rows * WORDS) + word % WORDS
        at = tl.max_contiguous(at, [1, 1, 4])
        inside = live & (step < num_steps)
        step = start // (RUN * PARTS) + chunk // (RUN // CHUNK)
        group = step.to(tl.int64) * (GROUPS * step_rows)
        exists = live & (step < num_steps)
        if FORMAT == "mxfp4":
            scale = tl.load(scales + group, mask=exists, other=0)
        else:
            scale = load_groups(scales + group, exists, step_rows, GROUPS, False)
        if SHIFTED:
            offset = load_groups(offsets + group, exists, step_rows, GROUPS, False)
    else:
        at = start // 4 + tl.max_contiguous(tl.arange(0, COLUMNS // 4)[None, None, :], [1, 1, 4])
        inside = live & (at < in_features // 4)
        if FORMAT == "blocks":
            column = start + chunk * (CHUNK * PARTS)
            exists = live & (column < in_features)
            scale = load_groups(scales + column // BLOCK, exists, 0, 1, False)
    weight = tl.load(rows + at, mask=inside, other=0, eviction_policy="evict_first")
    return weight, scale, offset


@triton.jit
def _number(words, FIRST: tl.constexpr, BITS: tl.constexpr):
    """Return the BITS bits from bit FIRST on of each int32, plus `_base`, in fp32."""
    LAST: tl.constexpr = 16 if BITS == 4 else 15  # bit of fp32 to which they move
    if FIRST < LAST:
        moved = words << (LAST - FIRST)
    else:
        moved = words >> (FIRST - LAST)
    # The compiler's own code takes two instructions for this.
    if INTERPRETED:
        bits = (moved & ((1 << BITS) - 1 << LAST)) | (127 + 23 - LAST << 23)
        number = bits.to(tl.float32, bitcast=True)
    elif BITS == 4:
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x000F0000, 0x43000000, 0xEA;",
            "=f,r",
            [moved],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        number = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x007F8000, 0x43800000, 0xEA;",
            "=f,r",
            [moved],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return number


@triton.jit
def _base(BITS: tl.constexpr):
    """Return the power of two whose last digits integers become."""
    return 128.0 if BITS == 4 else 256.0


@triton.jit
def _add_pairs(sums, words, x, PART: tl.constexpr, PARTS: tl.constexpr):
    """Add products of a plane of words and columns of x. Return (sums, those of pairs of x)."""
    BITS: tl.constexpr = 16 // PARTS
    even, odd = tl.split(tl.reshape(x, [1, x.shape[1], x.shape[2] // 2, 2]))
    sums += _number(words, PART * BITS, BITS) * even
    sums += _number(words, 16 + PART * BITS, BITS) * odd
    return sums, even + odd


@triton.jit
def _mxfp4_number(halves, PART: tl.constexpr):
    """Return a number of the upper half of each int32, 2^126 times too small (`mxfp4.numbers`)."""
    MASK: tl.constexpr = -0x7E400000  # sign, end of the exponent, first digit
    if PART == 3:
        bits = (halves >> 6) & 0x01800000 | (halves >> 5) & 0x00400000
        bits |= (halves << 5) & -0x80000000
    else:
        bits = (halves << 3 * PART) & MASK
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _mxfp4_chunks(words, exponents, x, PART: tl.constexpr):
    """Multiply a plane of words, a group of 32 of each step, and columns of x. Sum by chunks."""
    # Sums of numbers so small would lose digits. 2^64 here, and 2^62 in the factor.
    x *= 18446744073709551616.0
    even, odd = tl.split(tl.reshape(x, [1, x.shape[1], x.shape[2] // 2, 2]))
    sums = _mxfp4_number(words << 16, PART) * even + _mxfp4_number(words, PART) * odd
    exponent = (exponents >> (8 * PART)) & 255
    factor = ((exponent + 62) << 23).to(tl.float32, bitcast=True)
    return factor * _sum_chunks(sums, CHUNK // 2)


@triton.jit
def _multiply_fours(words, x, PART: tl.constexpr):
    """Multiply words of FP8 and a half of the columns of x, summed over those of each word."""
    CHOICES: tl.constexpr = x.shape[1]
    WORDS: tl.constexpr = x.shape[2] // 4
    halves = tl.reshape(words, [words.shape[0], words.shape[1], WORDS // 2, 2, 2])
    low, high = tl.split(tl.permute(halves, [0, 1, 2, 4, 3]))
    if PART == 1:
        low = high
    a, b, c, d = unpacked(tl.reshape(low, [words.shape[0], words.shape[1], WORDS]))
    even, odd = tl.split(tl.reshape(x, [1, CHOICES, WORDS, 2, 2]))
    x_a, x_c = tl.split(even)
    x_b, x_d = tl.split(odd)
    return a * x_a + b * x_b + c * x_c + d * x_d


@triton.jit
def _sum_chunks(numbers, COUNT: tl.constexpr):
    """Sum each COUNT adjacent numbers, those of a thread."""
    SUMS: tl.constexpr = numbers.shape[2] // COUNT
    return tl.sum(tl.reshape(numbers, [numbers.shape[0], numbers.shape[1], SUMS, COUNT]), 3)


@triton.jit
def _tile_sums(
    tile,
    x_rows,
    start,
    live,
    in_features,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Return the products of a tile and x, `[rows, choices, columns / PARTS / CHUNK]`."""
    weight, scale, offset = tile
    BITS: tl.constexpr = 16 // PARTS
    ROWS: tl.constexpr = weight.shape[0]
    CHOICES: tl.constexpr = weight.shape[1]
    WIDTH: tl.constexpr = COLUMNS // PARTS
    SHARED: tl.constexpr = PARTS // GROUPS  # parts with the same scale
    place = tl.arange(0, WIDTH)[None, None, :]
    total = tl.zeros([ROWS, CHOICES, WIDTH // CHUNK], tl.float32)
    for part in tl.static_range(PARTS):
        column = start + place // RUN * (RUN * PARTS) + part * RUN + place % RUN
        inside = live & (column < in_features) if MASKED else live
        x = tl.load(x_rows + column, mask=inside, other=0.0).to(tl.float32)
        if FORMAT == "integers":
            if part % SHARED == 0:
                sums = tl.zeros([ROWS, CHOICES, WIDTH // 2], tl.float32)
                x_sums = tl.zeros([1, x.shape[1], WIDTH // 2], tl.float32)
            sums, x_pairs = _add_pairs(sums, weight, x, part, PARTS)
            x_sums += x_pairs
            if part % SHARED == SHARED - 1:
                chunks = _sum_chunks(sums, CHUNK // 2)
                x_chunks = _sum_chunks(x_sums, CHUNK // 2)
                if SHIFTED:
                    chunks -= _base(BITS) * x_chunks
                    total += offset[part // SHARED] * x_chunks
                else:
                    chunks -= (_base(BITS) + 2.0 ** (BITS - 1)) * x_chunks
                total += scale[part // SHARED] * chunks
        elif FORMAT == "mxfp4":
            total += _mxfp4_chunks(weight, scale, x, part)
        elif FORMAT == "plain":
            total += _sum_chunks(weight.to(tl.float32) * x, CHUNK)
        elif part == 0:
            fours = _multiply_fours(weight, x, part)
        else:
            total += _sum_chunks(fours + _multiply_fours(weight, x, part), CHUNK // 4)
    if FORMAT == "blocks":
        total *= scale[0]
    return total


@triton.jit
def _row_sums(
    tile,
    rows,
    scales,
    offsets,
    step_rows,
    x_rows,
    live,
    in_features,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Return the products of rows and x, `[rows, choices]`.

    tile: the first one; x_rows, live: `[1, choices, 1]`, or one for all. Each tile is loaded while
    the one before is multiplied."""
    SUMS: tl.constexpr = COLUMNS // PARTS // CHUNK
    acc = tl.zeros([rows.shape[0], rows.shape[1], SUMS], tl.float32)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    for start in range(0, last, COLUMNS):
        after = _load_tile(
            rows,
            scales,
            offsets,
            step_rows,
            start + COLUMNS,
            live,
            in_features,
            FORMAT,
            COLUMNS,
            RUN,
            PARTS,
            GROUPS,
            SHIFTED,
        )
        acc += _tile_sums(
            tile,
            x_rows,
            start,
            live,
            in_features,
            False,
            FORMAT,
            COLUMNS,
            RUN,
            PARTS,
            GROUPS,
            SHIFTED,
        )
        tile = after
    acc += _tile_sums(
        tile, x_rows, last, live, in_features, True, FORMAT, COLUMNS, RUN, PARTS, GROUPS, SHIFTED
    )
    return tl.sum(acc, 2)


@triton.jit
def _pointers(
    weight_ptr,
    scale_ptr,
    offset_ptr,
    expert,
    row,
    head,
    in_features,
    expert_rows,
    FORMAT: tl.constexpr,
    RUN: tl.constexpr,
):
    """Return pointers to the first numbers or words, scales and offsets of rows of experts.

    head: the first of the rows, whose block of FP8 all are in."""
    if FORMAT == "plain":
        rows, first = first_rows(weight_ptr, expert, row, in_features, expert_rows, 0)
    elif FORMAT == "integers" or FORMAT == "mxfp4":
        words = weight_ptr.to(tl.pointer_type(tl.int32))
        rows, first = first_rows(words, expert, row, in_features, expert_rows, RUN // 2)
    else:
        words = weight_ptr.to(tl.pointer_type(tl.int32))
        rows, first = first_rows(words, expert, row, in_features // 4, expert_rows, 0)
    if FORMAT == "blocks":
        first = (expert * expert_rows + head) // BLOCK * tl.cdiv(in_features, BLOCK)
    return rows, scale_ptr + first, offset_ptr + first


@triton.jit
def vector_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    expert_rows,
    step_rows,
    id_ptr,
    out_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS gated outputs of one choice of the token. Rows past the last repeat it."""
    wait(PDL)
    release(PDL)
    choice = tl.program_id(1)
    expert = tl.load(id_ptr + choice).to(tl.int64)
    if expert < 0:
        return
    head = tl.program_id(0) * ROWS
    output = tl.minimum(head + tl.arange(0, ROWS), size - 1)
    is_up = tl.arange(0, 2)[None, :]
    row = gated_row(output[:, None], is_up, size, INTERLEAVED)
    rows, scales, offsets = _pointers(
        weight_ptr,
        scale_ptr,
        offset_ptr,
        expert,
        row[:, :, None],
        gated_row(head, is_up, size, INTERLEAVED)[:, :, None],
        in_features,
        expert_rows,
        FORMAT,
        RUN,
    )
    row += expert * (2 * size)
    live = tl.full([1, 1, 1], 1, tl.int1)
    # Each thread loads CHUNK columns of x. If these are few, gate and up have a copy each.
    COPIES: tl.constexpr = 1 if COLUMNS // PARTS >= 1024 else 2
    x_rows = x_ptr + tl.zeros([1, COPIES, 1], tl.int32)
    tile = _load_tile(
        rows,
        scales,
        offsets,
        step_rows,
        0,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        RUN,
        PARTS,
        GROUPS,
        SHIFTED,
    )
    sums = _row_sums(
        tile,
        rows,
        scales,
        offsets,
        step_rows,
        x_rows,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        RUN,
        PARTS,
        GROUPS,
        SHIFTED,
    )
    if FORMAT == "rows":
        sums *= tl.load(scale_ptr + row)
    if BIASED:
        sums += tl.load(bias_ptr + row).to(tl.float32)
    gate, up = tl.split(sums)
    y = gated(gate, up, KIND)
    tl.store(out_ptr + choice * size + output, y.to(out_ptr.dtype.element_ty))


@triton.jit
def vector_down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    expert_rows,
    step_rows,
    id_ptr,
    share_ptr,
    out_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFTED: tl.constexpr,
    BIASED: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of the token, of all its experts at once."""
    release(PDL)
    choice = tl.arange(0, CHOICES)
    expert = tl.load(id_ptr + choice, mask=choice < CHOSEN, other=-1).to(tl.int64)
    share = tl.load(share_ptr + choice, mask=expert >= 0, other=0.0)
    live = (expert >= 0)[None, :, None]
    expert = tl.maximum(expert, 0)[None, :]
    head = tl.program_id(0) * ROWS
    output = tl.minimum(head + tl.arange(0, ROWS), size - 1)
    rows, scales, offsets = _pointers(
        weight_ptr,
        scale_ptr,
        offset_ptr,
        expert[:, :, None],
        output[:, None, None],
        head,
        in_features,
        expert_rows,
        FORMAT,
        RUN,
    )
    row = expert * size + output[:, None]
    tile = _load_tile(
        rows,
        scales,
        offsets,
        step_rows,
        0,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        RUN,
        PARTS,
        GROUPS,
        SHIFTED,
    )
    if FORMAT == "rows":
        scale = tl.load(scale_ptr + row)
    if BIASED:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    wait(PDL)
    x_rows = x_ptr + (choice * in_features)[None, :, None]
    sums = _row_sums(
        tile,
        rows,
        scales,
        offsets,
        step_rows,
        x_rows,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        RUN,
        PARTS,
        GROUPS,
        SHIFTED,
    )
    if FORMAT == "rows":
        sums *= scale
    if BIASED:
        sums += bias
    y = tl.sum(sums * share[None, :], 1)
    tl.store(out_ptr + output, y.to(out_ptr.dtype.element_ty))
