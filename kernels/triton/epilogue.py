"""The end of a product of several rows, shared by the tile kernels of all formats.

A kernel multiplies a tile of the weight by x, in the weight's format, into sums in fp32. The rest
is here: row scales, LoRA delta, the scale of rows that are not normed yet, bias, gate, activation,
residual sum and norm. Absent parts compile to nothing: 0.0 takes the place of what they load.

A kernel calls `tile_rows` and `tile_outputs`, `load_constants` before its `wait`, `load_inputs`
after it, and `finish` after its loop."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .activation import apply

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Norm(NamedTuple):
    """An RMS norm after a product and its residual sum."""

    residual: Tensor  # [num_tokens, size]; becomes the sum
    weight: Tensor
    eps: float
    square_sums: Tensor  # fp64 zeros [num_tokens]; become the rows' sums of squares


class Delta(NamedTuple):
    """The sum x Aᵀ Bᵀ that each token's LoRA adapter adds to a product (arXiv:2106.09685).

    Merged projections have their ranks side by side: B is zero outside of a projection's own. The
    rank is a power of two, at least 16."""

    low: Tensor  # x Aᵀ of each token's own adapter, [num_tokens, rank] in the type of x
    up: Tensor  # B of each slot, [num_slots, rows of the weight, rank] in the type of x
    slots: Tensor  # int32 [num_tokens], slot of each token's adapter; -1: none
    used: Tensor  # int32 [1 + num_slots]: how many of the slots occur, and which


@triton.jit
def dot(a, b, acc):
    """Return a @ bᵀ + acc in fp32. The interpreter multiplies bits of bf16, so they are widened."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    if len(acc.shape) == 2:
        b = tl.trans(b)
    else:
        b = tl.trans(b, 0, 2, 1)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tile_rows(size, ROWS: tl.constexpr, GATED: tl.constexpr):
    """Return (the weight's rows in a tile, the columns of the product).

    If GATED, half of the rows are gate's and half up's. Rows past the last one repeat it."""
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    lane = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * OUTPUTS + lane % OUTPUTS, size - 1)
    if GATED:
        row += lane // OUTPUTS * size
    return row, tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)


@triton.jit
def tile_outputs(token, out_row, num_tokens, size):
    """Return (places of a tile's outputs in `[num_tokens, size]`, whether they are inside)."""
    stored = (token < num_tokens)[:, None] & (out_row < size)[None, :]
    return (token * size)[:, None] + out_row[None, :], stored


@triton.jit
def load_constants(
    scale_ptr,
    bias_ptr,
    norm_ptr,
    row,
    out_row,
    size,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Load what no kernel of a step writes: (row scales, bias, norm's weight)."""
    return (
        tl.load(scale_ptr + row) if SCALED else 0.0,
        tl.load(bias_ptr + row).to(tl.float32) if BIASED else 0.0,
        tl.load(norm_ptr + out_row, mask=out_row < size, other=0.0).to(tl.float32)
        if NORMED
        else 0.0,
    )


@triton.jit
def load_inputs(
    given_ptr,
    residual_ptr,
    low_ptr,
    slot_ptr,
    used_ptr,
    token,
    at_out,
    stored,
    num_tokens,
    UNSCALED: tl.constexpr,
    NORMED: tl.constexpr,
    RANK: tl.constexpr,
):
    """Load what earlier kernels wrote: (square sums, residual, x Aᵀ, its slots, their number)."""
    live = token < num_tokens
    at_low = (token * RANK)[:, None] + tl.arange(0, RANK or 1)[None, :]
    return (
        tl.load(given_ptr + token, mask=live, other=0.0).to(tl.float32) if UNSCALED else 0.0,
        tl.load(residual_ptr + at_out, mask=stored, other=0.0) if NORMED else 0.0,
        tl.load(low_ptr + at_low, mask=live[:, None], other=0.0) if RANK else 0.0,
        tl.load(slot_ptr + token, mask=live, other=-1) if RANK else 0.0,
        tl.load(used_ptr) if RANK else 0.0,
    )


@triton.jit
def _add_delta(
    acc, low, slot, num_used, up_ptr, used_ptr, row, num_rows, WEIGHT_FIRST: tl.constexpr
):
    """Add x Aᵀ Bᵀ to sums `[tokens, rows]`. WEIGHT_FIRST: the product was weight @ xᵀ.

    Each adapter in use is multiplied by all tokens, those of others as zeros: its tile of B is 2
    to 4 per mille of the weight's tile."""
    RANK: tl.constexpr = low.shape[1]
    if WEIGHT_FIRST:
        delta = tl.zeros([acc.shape[1], acc.shape[0]], tl.float32)
    else:
        delta = tl.zeros(acc.shape, tl.float32)
    for i in tl.range(0, num_used, num_stages=1):
        adapter = tl.load(used_ptr + 1 + i)
        at_up = (adapter.to(tl.int64) * num_rows + row) * RANK
        up = tl.load(up_ptr + at_up[:, None] + tl.arange(0, RANK)[None, :])
        own = tl.where((slot == adapter)[:, None], low, 0.0)
        if WEIGHT_FIRST:
            delta = dot(up, own, delta)
        else:
            delta = dot(own, up, delta)
    if WEIGHT_FIRST:
        delta = tl.trans(delta)
    return acc + delta


@triton.jit
def finish(
    acc,
    constants,
    inputs,
    out_ptr,
    residual_ptr,
    found_ptr,
    up_ptr,
    used_ptr,
    row,
    token,
    at_out,
    stored,
    num_tokens,
    size,
    in_features,
    eps,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    UNSCALED: tl.constexpr,
    NORMED: tl.constexpr,
    RANK: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Store the outputs of a tile.

    acc: sums in fp32, `[rows, tokens]` if WEIGHT_FIRST, else transposed. constants, inputs: of
    `load_constants` and `load_inputs`; their absent parts are skipped."""
    scale, bias, norm = constants
    square_sums, residual, low, slot, num_used = inputs
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    if SCALED:
        acc *= scale[None, :]
    if RANK:
        num_rows = 2 * size if GATED else size
        acc = _add_delta(acc, low, slot, num_used, up_ptr, used_ptr, row, num_rows, WEIGHT_FIRST)
    if UNSCALED:
        acc *= tl.rsqrt(square_sums / in_features + eps)[:, None]
    if BIASED:
        acc += bias[None, :]
    if GATED:
        halves = tl.reshape(acc, [stored.shape[0], 2, stored.shape[1]])
        y, up = tl.split(tl.permute(halves, [0, 2, 1]))
    else:
        y = acc
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= up
    if NORMED:
        total = (y + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + at_out, total, mask=stored)
        y = tl.where(stored, total.to(tl.float32), 0.0)
        # In fp64 the order of programs hardly ever shows once the sum is rounded.
        square_sums = tl.sum(y * y, 1).to(tl.float64)
        tl.atomic_add(found_ptr + token, square_sums, mask=token < num_tokens, sem="relaxed")
        y *= norm[None, :]
    tl.store(out_ptr + at_out, y.to(out_ptr.dtype.element_ty), mask=stored)
