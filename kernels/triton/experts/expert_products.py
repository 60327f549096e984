"""Products of rows of x and rows of one expert's weight, for each format of `reference.Stack`.

All compute fp32 `[tokens, rows]`. The first operand of the tensor cores is the weight if there are
few tokens, since they take 64 rows of it at a time, and where it is converted, since they take that
operand from registers. Scales of groups and blocks are applied to sums, so they keep their
precision."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..products.epilogue import dot
from ..products.fp8_matmul import SECOND
from ..products.grouped import unpack_int4, unpack_int8
from ..products.matmul import BLOCK, like, load_once
from .mxfp4 import product as mxfp4_product


@triton.jit
def gated_row(output, is_up, size, INTERLEAVED: tl.constexpr):
    """Return the weight's row of gate (0) or up (1) of an output."""
    if INTERLEAVED:
        row = 2 * output + is_up
    else:
        row = output + is_up * size
    return row


@triton.jit
def _plain_product(
    rows,
    x_rows,
    live,
    in_features,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FEW: tl.constexpr,
):
    """Multiply by weights in the type of x, or FP8 whose scales are applied afterwards."""
    TOKENS: tl.constexpr = live.shape[0]
    ROWS: tl.constexpr = rows.shape[0]
    CONVERTED: tl.constexpr = SCALED and not QUANTIZED
    WEIGHT_FIRST: tl.constexpr = CONVERTED or TOKENS < 64
    column = tl.arange(0, COLUMNS)[None, :]
    if WEIGHT_FIRST:
        acc = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
    for start in tl.range(0, in_features, COLUMNS, num_stages=STAGES):
        at = start + column
        inside = at < in_features
        if FEW:
            weight = load_once(rows[:, None] + at, inside, EVEN)
        elif EVEN:
            weight = tl.load(rows[:, None] + at)
        else:
            weight = tl.load(rows[:, None] + at, mask=inside, other=0.0)
        in_x = live[:, None] if EVEN else live[:, None] & inside
        x = tl.load(x_rows[:, None] + at, mask=in_x, other=0.0)
        if CONVERTED:
            weight = like(weight, x.dtype)
        if WEIGHT_FIRST:
            acc = dot(weight, x, acc)
        else:
            acc = dot(x, weight, acc)
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _block_product(
    rows,
    scales,
    x_rows,
    x_scales,
    x_count,
    live,
    in_features,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Multiply by FP8 in steps of a block of 128 columns, or a part of it.

    SCALED: the weight has scales of blocks, at `scales` for each row's first one; x_scales: those
    of x, whose scales of a block are adjacent, `x_count` of them. The second part of x is as many
    rows after the first."""
    WEIGHT_FIRST: tl.constexpr = PARTS != 1 or live.shape[0] < 64
    column = tl.arange(0, COLUMNS)[None, :]
    if WEIGHT_FIRST:
        zero = tl.zeros([rows.shape[0], live.shape[0]], tl.float32)
    else:
        zero = tl.zeros([live.shape[0], rows.shape[0]], tl.float32)
    acc = zero
    for start in tl.range(0, in_features, COLUMNS, num_stages=STAGES):
        at = start + column
        inside = at < in_features
        weight = load_once(rows[:, None] + at, inside, EVEN)
        in_x = live[:, None] if EVEN else live[:, None] & inside
        x = tl.load(x_rows[:, None] + at, mask=in_x, other=0.0)
        if PARTS == 0:
            weight = like(weight, x.dtype)
        if WEIGHT_FIRST:
            sums = dot(weight, x, zero)
        else:
            sums = dot(x, weight, zero)
        if PARTS == 2:
            second = tl.load(x_rows[:, None] + x_count * in_features + at, mask=in_x, other=0.0)
            sums += dot(weight, second, zero) * (1.0 / SECOND)
        if PARTS:
            x_scale = tl.load(x_scales + start // BLOCK * x_count, mask=live, other=0.0)
            sums *= x_scale[None, :] if WEIGHT_FIRST else x_scale[:, None]
        if SCALED:
            scale = tl.load(scales + start // BLOCK)
            sums *= scale[:, None] if WEIGHT_FIRST else scale[None, :]
        acc += sums
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    return acc


@triton.jit
def _integer_product(
    rows,
    scales,
    offsets,
    step_rows,
    x_rows,
    live,
    in_features,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply by integers, as `grouped` does.

    rows, scales, offsets: pointers to those of each row's first step and group; step_rows: from a
    row's step or group to its next one."""
    PLANES: tl.constexpr = COLUMNS // WORDS
    SHARED: tl.constexpr = PLANES * GROUP // COLUMNS  # planes with the same scale
    MIDDLE: tl.constexpr = 2.0 ** (16 // PLANES - 1)
    DTYPE: tl.constexpr = x_rows.dtype.element_ty
    word = tl.arange(0, WORDS)[None, :]
    zero = tl.zeros([rows.shape[0], live.shape[0]], tl.float32)
    ones = tl.full([rows.shape[0], WORDS], 1.0, tl.float32).to(DTYPE)
    acc = zero
    for start in tl.range(0, in_features, COLUMNS, num_stages=STAGES):
        step = tl.cast(start // COLUMNS, tl.int64) * step_rows
        words = load_once(rows[:, None] + step * WORDS + word, True, True)
        if PLANES == 4:
            planes = unpack_int4(words, DTYPE)
        else:
            planes = unpack_int8(words, DTYPE)
        sums = zero
        ones_sums = zero
        for plane in tl.static_range(PLANES):
            at = start + plane * WORDS + word
            x = tl.load(x_rows[:, None] + at, mask=live[:, None], other=0.0)
            sums = dot(planes[plane], x, sums)
            if SHIFTED:
                ones_sums = dot(ones, x, ones_sums)
            if plane % SHARED == SHARED - 1:
                group = step * (COLUMNS // GROUP) + plane // SHARED * step_rows
                scale = tl.load(scales + group).to(tl.float32)[:, None]
                acc += scale * sums
                sums = zero
                if SHIFTED:
                    offset = tl.load(offsets + group).to(tl.float32)[:, None]
                    acc += (offset + MIDDLE * scale) * ones_sums
                    ones_sums = zero
    return tl.trans(acc)


@triton.jit
def first_rows(pointer, expert, row, in_features, expert_rows, WORDS: tl.constexpr):
    """Return (pointers to rows of an expert's weight, their places among its scales).

    row: within the expert; expert_rows: rows from an expert to the next one, of a step if numbers
    are words."""
    first = expert * expert_rows + row
    if WORDS:
        rows = pointer + first * WORDS
    else:
        rows = pointer + first * in_features
    return rows, first


@triton.jit
def product(
    rows,
    first,
    scale_ptr,
    offset_ptr,
    step_rows,
    x_rows,
    x_scales,
    x_count,
    live,
    in_features,
    FORMAT: tl.constexpr,
    COLUMNS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    FEW: tl.constexpr,
):
    """Multiply rows of x by rows of a weight of this format (`experts.Format`).

    rows, first: of `first_rows`; step_rows: rows from a step to the next one; x_rows, x_scales,
    live: of each row of x, pointers and whether it exists; PARTS: FP8 numbers whose sum is one of
    x, 0 if that is in 16 bits."""
    if FORMAT == "mxfp4":
        acc = mxfp4_product(
            rows, scale_ptr + first, step_rows, x_rows, live, in_features, STAGES, EVEN
        )
    elif FORMAT == "integers":
        acc = _integer_product(
            rows,
            scale_ptr + first,
            offset_ptr + first,
            step_rows,
            x_rows,
            live,
            in_features,
            COLUMNS,
            WORDS,
            GROUP,
            SHIFTED,
            STAGES,
        )
    elif FORMAT == "blocks" or PARTS == 2:
        scales = scale_ptr + first // BLOCK * tl.cdiv(in_features, BLOCK)
        acc = _block_product(
            rows,
            scales,
            x_rows,
            x_scales,
            x_count,
            live,
            in_features,
            COLUMNS,
            STAGES,
            EVEN,
            PARTS,
            FORMAT == "blocks",
        )
    else:
        acc = _plain_product(
            rows,
            x_rows,
            live,
            in_features,
            COLUMNS,
            STAGES,
            EVEN,
            FORMAT == "rows",
            PARTS == 1,
            FEW,
        )
    return acc
