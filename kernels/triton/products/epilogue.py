"""The end of a product of several rows, shared by the tile kernels of all formats.

A kernel multiplies a tile of the weight by x, in the weight's format, into sums in fp32. The rest
is here: row scales, LoRA delta, the scale of rows that are not normed yet, bias, gate, activation,
residual sum and norm. Absent parts compile to nothing: 0.0 takes the place of what they load.

A kernel calls `tile_rows` and `tile_outputs` and `load_constants` before its `wait`, `load_inputs`
after it, and `finish` after its loop.

With a delta, a kernel waits after its loop: x is ready when `lora.shrink`, which runs at the same
time, has released it. So nothing may delay the loop. `load_adapters`, and `load_slot` in kernels of
one row, come after it, since each of their loads waits for the one before."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..activation import apply

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
RANKS = tl.constexpr(16)
"""Ranks of a block. Adapters have blocks of so many ranks, the last one padded with zeros."""
AT_ONCE = tl.constexpr(4)  # blocks in one product


class Norm(NamedTuple):
    """An RMS norm after a product and its residual sum."""

    residual: Tensor  # [num_tokens, size]; becomes the sum
    weight: Tensor
    eps: float
    square_sums: Tensor  # fp64 zeros [num_tokens]; become the rows' sums of squares


class Delta(NamedTuple):
    """The sum x Aᵀ Bᵀ that each token's LoRA adapter adds to a product (arXiv:2106.09685).

    A weight may have several parts, as q, k and v: each has ranks of its own in `low`, and its rows
    of `up` are multiplied by those. `lora.shrink` computes `low`."""

    low: Tensor
    """x Aᵀ of each token's own adapter, [num_tokens, parts * rank] in the type of x."""
    up: Tensor  # B of each slot, [num_slots, rows of the weight, rank] in the type of x
    blocks: Tensor  # int32 [num_slots], blocks of RANKS ranks of each slot; 0: it adds nothing
    parts: Tensor  # int32 [rows of the weight], the part of each row
    places: Tensor  # int32 [num_tokens], place of each token's adapter in `used`; -1: none
    used: Tensor  # int32 [2 + n]: number of slots in use, their most blocks (1 or more), the slots

    @property
    def rank(self) -> int:
        return self.up.shape[2]

    @property
    def has_parts(self) -> bool:
        return self.low.shape[1] > self.rank

    def take(self, tokens: slice) -> Delta:
        return self._replace(low=self.low[tokens], places=self.places[tokens])


def row_arguments(delta: Delta | None, unused: Tensor) -> tuple[Tensor, ...]:
    """Return the arguments of a kernel of one row."""
    return (unused,) * len(Delta._fields) if delta is None else delta


def row_constants(delta: Delta | None) -> dict[str, int | bool]:
    """Return the constexpr arguments of a kernel of one row."""
    if delta is None:
        return {"RANK": 0, "PARTED": False}
    return {"RANK": delta.rank, "PARTED": delta.has_parts}


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
def side_by_side(a, b):
    """Return `[rows, 2 * columns]`, b after a. As an operand of the tensor cores it takes no
    instructions; one product of it, unlike two, is computed while the next operand is made."""
    return tl.reshape(tl.permute(tl.join(a, b), [0, 2, 1]), [a.shape[0], 2 * a.shape[1]])


@triton.jit
def tile_rows(size, ROWS: tl.constexpr, GATED: tl.constexpr, tile=None):
    """Return (the weight's rows in a tile, the columns of the product).

    If GATED, half of the rows are gate's and half up's. Rows past the last one repeat it. tile:
    None if it is the program's first index."""
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    lane = tl.arange(0, ROWS)
    if tile is None:
        tile = tl.program_id(0)
    row = tl.minimum(tile * OUTPUTS + lane % OUTPUTS, size - 1)
    if GATED:
        row += lane // OUTPUTS * size
    return row, tile * OUTPUTS + tl.arange(0, OUTPUTS)


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
    row_part_ptr,
    row,
    out_row,
    size,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
    PARTED: tl.constexpr,
):
    """Load what no kernel of a step writes: (row scales, bias, norm's weight, rows' parts)."""
    return (
        tl.load(scale_ptr + row) if SCALED else 0.0,
        tl.load(bias_ptr + row).to(tl.float32) if BIASED else 0.0,
        tl.load(norm_ptr + out_row, mask=out_row < size, other=0.0).to(tl.float32)
        if NORMED
        else 0.0,
        load_parts(row_part_ptr + row, PARTED, row.shape[0]),
    )


@triton.jit
def load_inputs(
    given_ptr,
    residual_ptr,
    token,
    at_out,
    stored,
    adapters,
    num_tokens,
    UNSCALED: tl.constexpr,
    NORMED: tl.constexpr,
):
    """Load what earlier kernels wrote: (square sums, residual, adapters as they are given)."""
    live = token < num_tokens
    return (
        tl.load(given_ptr + token, mask=live, other=0.0).to(tl.float32) if UNSCALED else 0.0,
        tl.load(residual_ptr + at_out, mask=stored, other=0.0) if NORMED else 0.0,
        adapters,
    )


@triton.jit
def load_places(place_ptr, token, num_tokens):
    """Return the places of tokens' adapters in `used`; -1: none."""
    return tl.load(place_ptr + token, mask=token < num_tokens, other=-1)


@triton.jit
def load_adapters(block_ptr, used_ptr, index, part):
    """Return (tokens' places in `used`, (first place, first part, number of parts, most blocks),
    number of units, the first AT_ONCE units, the next).

    A unit is a block of ranks of an adapter, of one part. Those of the tile's adapters and parts
    are numbered, blocks first."""
    first = tl.min(tl.where(index < 0, 2147483647, index))
    places = tl.maximum(tl.max(index) - first + 1, 0)
    first_part = tl.min(part)
    num_parts = tl.max(part) - first_part + 1
    most = tl.maximum(tl.load(used_ptr + 1), 1)
    span = (first, first_part, num_parts, most)
    total = places * num_parts * most
    units = _load_units(block_ptr, used_ptr, 0, span, total)
    next_units = _load_units(block_ptr, used_ptr, AT_ONCE, span, total)
    return index, span, total, units, next_units


@triton.jit
def _load_units(block_ptr, used_ptr, start, span, total):
    """Return (place in `used`, slot, part, block, whether there is one) of AT_ONCE units."""
    first, first_part, num_parts, most = span
    unit = start + tl.arange(0, AT_ONCE)
    place = tl.where(unit < total, first + unit // most // num_parts, 0)
    slot = tl.load(used_ptr + 2 + place)
    block = unit % most
    exists = (unit < total) & (block < tl.load(block_ptr + slot))
    return place, slot.to(tl.int64), first_part + unit // most % num_parts, block, exists


@triton.jit
def _load_factors(
    units, index, part, low_ptr, up_ptr, row, token, num_rows, low_stride, RANK: tl.constexpr
):
    """Return (x Aᵀ of the tokens, B) of units, `[tokens or rows, units * RANKS]`."""
    place, slot, unit_part, block, exists = units
    SIZE: tl.constexpr = place.shape[0] * RANKS
    column = (block * RANKS)[None, :, None] + tl.arange(0, RANKS)[None, None, :]
    at_up = (slot[None, :] * num_rows + row[:, None]) * RANK
    own = exists[None, :] & (part[:, None] == unit_part[None, :])
    up = tl.load(up_ptr + at_up[:, :, None] + column, mask=own[:, :, None], other=0.0)
    at_low = (token * low_stride)[:, None] + (unit_part * RANK)[None, :]
    own = exists[None, :] & (index[:, None] == place[None, :])
    low = tl.load(low_ptr + at_low[:, :, None] + column, mask=own[:, :, None], other=0.0)
    up = tl.reshape(up, [row.shape[0], SIZE])
    low = tl.reshape(low, [token.shape[0], SIZE])
    return low, up


@triton.jit
def _add_delta(
    acc,
    adapters,
    part,
    low_ptr,
    up_ptr,
    block_ptr,
    used_ptr,
    row,
    token,
    num_rows,
    low_stride,
    RANK: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr,
):
    """Add x Aᵀ Bᵀ to sums `[tokens, rows]`, or transposed if WEIGHT_FIRST.

    Each adapter of the tile's tokens is multiplied by all tokens, those of others as zeros: its
    tile of B is 2 to 4 per mille of the weight's tile. The next factors are loaded meanwhile."""
    index, span, total, units, next_units = adapters
    low, up = _load_factors(
        units, index, part, low_ptr, up_ptr, row, token, num_rows, low_stride, RANK
    )
    for start in tl.range(0, total, AT_ONCE, num_stages=1):
        after = _load_units(block_ptr, used_ptr, start + 2 * AT_ONCE, span, total)
        next_low, next_up = _load_factors(
            next_units, index, part, low_ptr, up_ptr, row, token, num_rows, low_stride, RANK
        )
        if WEIGHT_FIRST:
            acc = dot(up, low, acc)
        else:
            acc = dot(low, up, acc)
        low = next_low
        up = next_up
        next_units = after
    return acc


@triton.jit
def load_parts(pointers, PARTED: tl.constexpr, ROWS: tl.constexpr):
    """Return the parts of rows."""
    if PARTED:
        parts = tl.load(pointers)
    else:
        parts = tl.zeros([ROWS], tl.int32)
    return parts


@triton.jit
def load_slot(block_ptr, used_ptr, place):
    """Return (slot, number of blocks) of the only token's adapter. No blocks: it has none."""
    slot = tl.load(used_ptr + 2 + tl.maximum(place, 0)).to(tl.int64)
    return slot, tl.where(place < 0, 0, tl.load(block_ptr + slot))


@triton.jit
def load_row_up(up_ptr, slot, row, num_rows, RANK: tl.constexpr):
    """Return the first block of a slot's B for rows, in fp32. It is not used if there is none."""
    ups = up_ptr + ((slot * num_rows + row) * RANK)[:, None] + tl.arange(0, RANKS)[None, :]
    return tl.load(ups).to(tl.float32)


@triton.jit
def row_delta(low_ptr, up_ptr, up, slot, blocks, part, row, num_rows, RANK: tl.constexpr):
    """Return what the adapter adds to rows of the only token. up: of `load_row_up`."""
    rank = tl.arange(0, RANKS)[None, :]
    ups = up_ptr + ((slot * num_rows + row) * RANK)[:, None] + rank
    lows = low_ptr + (part * RANK)[:, None] + rank
    low = tl.load(lows, mask=blocks > 0, other=0.0).to(tl.float32)
    delta = tl.where(blocks > 0, tl.sum(low * up, 1), 0.0)
    for block in range(1, blocks):
        up = tl.load(ups + block * RANKS).to(tl.float32)
        low = tl.load(lows + block * RANKS).to(tl.float32)
        delta += tl.sum(low * up, 1)
    return delta


@triton.jit
def finish(
    acc,
    constants,
    inputs,
    out_ptr,
    residual_ptr,
    found_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    used_ptr,
    row,
    token,
    at_out,
    stored,
    num_tokens,
    size,
    in_features,
    low_stride,
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
    scale, bias, norm, part = constants
    square_sums, residual, adapters = inputs
    if SCALED:
        acc *= scale[:, None] if WEIGHT_FIRST else scale[None, :]
    if RANK:
        num_rows = 2 * size if GATED else size
        acc = _add_delta(
            acc,
            adapters,
            part,
            low_ptr,
            up_ptr,
            block_ptr,
            used_ptr,
            row,
            token,
            num_rows,
            low_stride,
            RANK,
            WEIGHT_FIRST,
        )
    if WEIGHT_FIRST:
        acc = tl.trans(acc)
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
