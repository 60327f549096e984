"""Kernels of `experts` of one token, multiplied in registers by all its experts at once."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import gated
from ..pdl import release, wait
from ..products.fp8 import unpacked
from .expert_products import gated_row


@triton.jit
def _load_units(rows, start, live, in_features, COLUMNS: tl.constexpr, SCALED: tl.constexpr):
    """Load a tile of the weight, `[rows, choices, columns]`, or FP8 as words of 4 columns."""
    UNIT: tl.constexpr = 4 if SCALED else 1
    # Threads load 8 numbers of the weight and of x each, so that none move between threads.
    unit = tl.max_contiguous(tl.arange(0, COLUMNS // UNIT)[None, None, :], [1, 1, 8 // UNIT])
    unit += start // UNIT
    inside = live & (unit < in_features // UNIT)
    return tl.load(rows + unit, mask=inside, other=0, eviction_policy="evict_first")


@triton.jit
def _products(weight, x, SCALED: tl.constexpr):
    """Multiply tiles, summed within each thread over 8 columns, or the 4 of a word of FP8."""
    CHOICES: tl.constexpr = x.shape[1]
    COLUMNS: tl.constexpr = x.shape[2]
    x = x.to(tl.float32)
    if SCALED:
        even, odd = tl.split(tl.reshape(x, [1, CHOICES, COLUMNS // 4, 2, 2]))
        x_a, x_c = tl.split(even)
        x_b, x_d = tl.split(odd)
        a, b, c, d = unpacked(weight)
        sums = a * x_a + b * x_b + c * x_c + d * x_d
    else:
        products = tl.reshape(
            weight.to(tl.float32) * x, [weight.shape[0], CHOICES, COLUMNS // 8, 8]
        )
        sums = tl.sum(products, 3)
    return sums


@triton.jit
def _row_sums(weight, rows, x_rows, live, in_features, COLUMNS: tl.constexpr, SCALED: tl.constexpr):
    """Return the products of rows and x, `[rows, choices]`.

    weight: the first tile of `rows`; x_rows, live: `[1, choices, 1]`. Each tile is loaded while the
    one before is multiplied."""
    column = tl.arange(0, COLUMNS)[None, None, :]
    SUMS: tl.constexpr = COLUMNS // 4 if SCALED else COLUMNS // 8
    acc = tl.zeros([rows.shape[0], rows.shape[1], SUMS], tl.float32)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    for start in range(0, last, COLUMNS):
        x = tl.load(x_rows + start + column, mask=live, other=0.0)
        after = _load_units(rows, start + COLUMNS, live, in_features, COLUMNS, SCALED)
        acc += _products(weight, x, SCALED)
        weight = after
    column += last
    x = tl.load(x_rows + column, mask=live & (column < in_features), other=0.0)
    return tl.sum(acc + _products(weight, x, SCALED), 2)


@triton.jit
def _units(weight_ptr, row, in_features, SCALED: tl.constexpr):
    """Return pointers to rows of a weight: to words of FP8."""
    if SCALED:
        rows = weight_ptr.to(tl.pointer_type(tl.int32)) + row * (in_features // 4)
    else:
        rows = weight_ptr + row * in_features
    return rows


@triton.jit
def vector_up_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    id_ptr,
    out_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS gated outputs of one choice of the token. Rows past the last repeat it."""
    wait(PDL)
    release(PDL)
    choice = tl.program_id(1)
    expert = tl.load(id_ptr + choice).to(tl.int64)
    if expert < 0:
        return
    out_row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    lane = tl.arange(0, 2 * ROWS)  # gate and up in turn
    output = tl.minimum(tl.program_id(0) * ROWS + lane // 2, size - 1)
    row = gated_row(output, lane % 2, size, INTERLEAVED) + expert * (2 * size)
    rows = _units(weight_ptr, row[:, None, None], in_features, SCALED)
    live = tl.full([1, 1, 1], 1, tl.int1)
    x_rows = x_ptr + tl.zeros([1, 1, 1], tl.int32)
    first = _load_units(rows, 0, live, in_features, COLUMNS, SCALED)
    sums = _row_sums(first, rows, x_rows, live, in_features, COLUMNS, SCALED)
    if SCALED:
        sums *= tl.load(scale_ptr + row)[:, None]
    if BIASED:
        sums += tl.load(bias_ptr + row).to(tl.float32)[:, None]
    gate, up = tl.split(tl.reshape(sums, [ROWS, 2]))
    y = gated(gate, up, KIND, LIMIT, ALPHA)
    tl.store(out_ptr + choice * size + out_row, y.to(out_ptr.dtype.element_ty))


@triton.jit
def vector_down_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    id_ptr,
    share_ptr,
    out_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of the token, of all its experts at once."""
    release(PDL)
    choice = tl.arange(0, CHOICES)
    expert = tl.load(id_ptr + choice, mask=choice < CHOSEN, other=-1).to(tl.int64)
    share = tl.load(share_ptr + choice, mask=expert >= 0, other=0.0)
    live = (expert >= 0)[None, :, None]
    out_row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    row = tl.maximum(expert, 0)[None, :] * size + out_row[:, None]
    rows = _units(weight_ptr, row[:, :, None], in_features, SCALED)
    first = _load_units(rows, 0, live, in_features, COLUMNS, SCALED)
    if SCALED:
        scale = tl.load(scale_ptr + row)
    if BIASED:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    wait(PDL)
    x_rows = x_ptr + (choice * in_features)[None, :, None]
    sums = _row_sums(first, rows, x_rows, live, in_features, COLUMNS, SCALED)
    if SCALED:
        sums *= scale
    if BIASED:
        sums += bias
    y = tl.sum(sums * share[None, :], 1)
    tl.store(out_ptr + out_row, y.to(out_ptr.dtype.element_ty))
