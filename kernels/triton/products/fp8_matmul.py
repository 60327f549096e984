"""Products of many rows rounded to FP8 with FP8 weights that have a scale for each block.

x has a scale for each token and block of columns, so each step of the loop multiplies one block of
columns by the tensor cores, and its sums are scaled and added in fp32 registers (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2). Products of up to 64 rows are bound by reading the weight: its
rows are the first operand, and programs may divide its columns, as in `matmul`. Programs of more
rows run in an order in which those that run at the same time share their tiles of x and of the
weight in the L2 cache. See `epilogue` for what follows the loop."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import FP8_BLOCK

from ..activation import check_kind
from ..counters import counters
from ..pdl import fetch, release, supported, wait
from .epilogue import (
    Delta,
    dot,
    finish,
    load_adapters,
    load_constants,
    load_inputs,
    load_places,
    tile_outputs,
    tile_rows,
)
from .fp8 import FP8, MAX, MIN_GREATEST, check_scales, round_to_fp8, to_fp8
from .matmul import (
    BLOCK,
    MAX_TOKENS,
    MULTIPROCESSORS,
    fetch_block_scales,
    late,
    load_block_scales,
    load_once,
    shared_memory,
    sum_of_programs,
)

FETCHED = 2  # steps of the weight to prefetch
SECOND = tl.constexpr(16.0)  # factor of the second part of a number
NEIGHBORS = tl.constexpr(8)  # tiles of tokens whose programs run next to each other


class Tile(NamedTuple):
    """The shape of one program."""

    tokens: int
    rows: int  # of the weight
    stages: int  # steps of the loop in flight, if shared memory allows
    warps: int = 4
    splits: int = 1  # programs that share a tile. 1 if there are more tokens than in a tile


TILES = (Tile(128, 128, stages=4, warps=8), Tile(64, 128, stages=3), Tile(64, 64, stages=4))
ROW_CLASSES = (128, 192, 256, 512, 1024, 2048)
"""The most rows of x for which each kernel is chosen, after those of `matmul`."""


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (FP8 `[num_tokens, size]`, fp32 scales `[num_tokens, blocks of columns]`) of x.

    A block of a row is about FP8 * scale; its maximum becomes 448. x: `[num_tokens, size]`. The
    scales of a block are adjacent. Raises ValueError if x is not contiguous."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    num_tokens, size = x.shape
    blocks = -(-size // FP8_BLOCK)
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty((blocks, num_tokens), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(blocks)
    pdl = supported(x.device)
    if num_tokens:
        _quantize_kernel[(num_tokens,)](
            x,
            out,
            scales,
            size,
            BLOCKS=padded,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=max(1, min(16, padded // 4)),
        )
    return out, scales.T


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (FP8 `[2, num_tokens, size]`, fp32 scales `[num_tokens, blocks of columns]`) of x.

    A block of a row is (first + second / SECOND) * scale, a power of two. That is exact for bf16,
    whose eight digits the two have, but for numbers of less than 2^-13 of the block's maximum. x
    and scales: as in `quantize`."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    num_tokens, size = x.shape
    blocks = -(-size // FP8_BLOCK)
    out = torch.empty((2, num_tokens, size), dtype=FP8, device=x.device)
    scales = torch.empty((blocks, num_tokens), dtype=torch.float32, device=x.device)
    padded = triton.next_power_of_2(blocks)
    pdl = supported(x.device)
    if num_tokens:
        _split_kernel[(num_tokens,)](
            x,
            out,
            scales,
            size,
            BLOCKS=padded,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=max(1, min(16, padded // 4)),
        )
    return out, scales.T


def linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    *,
    tile: Tile | None = None,
    delta: Delta | None = None,
) -> Tensor:
    """Write act(x Wᵀ + b), or act(gate) * up, into `out` and return it.

    x, x_scale: of `quantize`; weight, scale: as in `fp8.linear`; out: `[num_tokens,
    size]`, contiguous, in 16 bits. `delta` is added before bias, activation and gate.

    NOTE: on Hopper the kernel reads the weight before the kernel ahead of it ends, like
    `linear.linear`.

    Raises ValueError for an unknown activation and for tensors of other types or shapes."""
    (num_tokens, in_features), num_rows = x.shape, weight.shape[0]
    if activation is not None:
        check_kind(activation)
    if x.dtype != FP8 or weight.dtype != FP8:
        raise ValueError(f"x and the weight must be {FP8}, not {x.dtype} and {weight.dtype}")
    if not x.is_contiguous() or not weight.is_contiguous() or weight.shape[1] != in_features:
        raise ValueError("x and the weight must be contiguous and have the same columns")
    blocks = -(-in_features // FP8_BLOCK)
    if x_scale.shape != (num_tokens, blocks) or not x_scale.T.is_contiguous():
        raise ValueError(f"x needs {blocks} scales for each row")
    check_scales(scale, weight, gated)
    tile = tile or best_tile(num_tokens, num_rows, in_features)
    stages = min(tile.stages, shared_memory(x.device) // (FP8_BLOCK * (tile.tokens + tile.rows)))
    row_tiles, token_tiles = -(-num_rows // tile.rows), -(-num_tokens // tile.tokens)
    share = -(-blocks // tile.splits) * FP8_BLOCK
    splits = -(-in_features // share)  # fewer if there are few columns
    parts = counts = out
    if splits > 1:
        if token_tiles > 1:
            raise ValueError(f"splits are for up to {tile.tokens} rows")
        shape = (splits, row_tiles, tile.tokens, tile.rows)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        counts = counters(x.device, row_tiles)
    pdl = supported(x.device)
    _rounded_kernel[(row_tiles * token_tiles, splits)](
        x,
        x_scale,
        weight,
        scale,
        scale if bias is None else bias,
        out,
        parts,
        counts,
        *(delta or (out,) * len(Delta._fields)),
        num_tokens,
        num_rows // 2 if gated else num_rows,
        in_features,
        0 if delta is None else delta.low.shape[-1],
        share,
        TOKENS=tile.tokens,
        ROWS=tile.rows,
        SPLITS=splits,
        STAGES=max(1, stages),
        FETCHED=FETCHED if pdl else 0,
        EVEN=in_features % FP8_BLOCK == 0,
        BLOCKED=scale.dim() == 2,
        BIASED=bias is not None,
        KIND=activation or "",
        GATED=gated,
        LATE=late(num_tokens, activation, gated, False),
        RANK=0 if delta is None else delta.rank,
        PARTED=delta is not None and delta.has_parts,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=tile.warps,
    )
    return out


def best_tile(num_tokens: int, num_rows: int, in_features: int) -> Tile:
    """Return the tile of a product. The tiles of more rows read the least from the L2 cache."""
    if num_tokens <= MAX_TOKENS:
        programs = -(-num_rows // 64)
        splits = next((n for n in (4, 2) if programs * n <= 2 * MULTIPROCESSORS), 1)
        return Tile(32 if num_tokens <= 32 else 64, 64, stages=6, splits=splits)
    most = next((size for size in ROW_CLASSES if size >= num_tokens), 2 * ROW_CLASSES[-1])

    def reads(tile: Tile) -> int:
        """Return the rows of x and of the weight that a multiprocessor reads."""
        programs = -(-most // tile.tokens) * -(-num_rows // tile.rows)
        return -(-programs // MULTIPROCESSORS) * (tile.tokens + tile.rows)

    return min(TILES, key=reads)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, size, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Quantize one row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    greatest = tl.maximum(tl.max(tl.abs(x), 1), MIN_GREATEST)
    values = to_fp8(x * tl.div_rn(MAX, greatest)[:, None])
    tl.store(out_ptr + row * size + column, values, mask=column < size)
    scales = scale_ptr + block * tl.num_programs(0) + row
    tl.store(scales, tl.div_rn(greatest, MAX), mask=block < tl.cdiv(size, BLOCK))


@triton.jit
def _split_kernel(x_ptr, out_ptr, scale_ptr, size, BLOCKS: tl.constexpr, PDL: tl.constexpr):
    """Split one row, held in registers. The maximum of a block becomes 128 to 256."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCKS)
    column = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    at = row * size + column
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + at, mask=column < size, other=0.0).to(tl.float32)
    greatest = tl.maximum(tl.max(tl.abs(x), 1), MIN_GREATEST)
    exponent = (greatest.to(tl.int32, bitcast=True) >> 23) - 7  # biased, that of the scale
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    x *= inverse[:, None]
    # In fp32: ptxas 13 reads wrong registers when it widens FP8 that it has just packed.
    first = round_to_fp8(tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL))
    second = to_fp8((x - first) * SECOND)
    tl.store(out_ptr + at, to_fp8(first), mask=column < size)
    tl.store(out_ptr + tl.num_programs(0) * size + at, second, mask=column < size)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    scales = scale_ptr + block * tl.num_programs(0) + row
    tl.store(scales, scale, mask=block < tl.cdiv(size, BLOCK))


@triton.jit
def _place(num_tokens, num_rows, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """Return (tile of tokens, tile of the weight's rows) of a program."""
    token_tiles = tl.cdiv(num_tokens, TOKENS)
    row_tiles = tl.cdiv(num_rows, ROWS)
    program = tl.program_id(0)
    first = program // (NEIGHBORS * row_tiles) * NEIGHBORS
    count = tl.minimum(token_tiles - first, NEIGHBORS)
    program -= first * row_tiles
    return first + program % count, program // count


@triton.jit(do_not_specialize=["num_tokens"])
def _rounded_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    row_part_ptr,
    place_ptr,
    used_ptr,
    num_tokens,
    size,
    in_features,
    low_stride,
    share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    LATE: tl.constexpr,
    RANK: tl.constexpr,
    PARTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply TOKENS rows of x by ROWS rows of the weight, over `share` of the columns."""
    if not LATE:
        release(PDL)
    WEIGHT_FIRST: tl.constexpr = TOKENS < 64  # the tensor cores take 64 rows at a time
    num_rows = 2 * size if GATED else size
    token_tile, row_tile = _place(num_tokens, num_rows, TOKENS, ROWS)
    row, out_row = tile_rows(size, ROWS, GATED, row_tile)
    begin = tl.program_id(1) * share
    left = in_features - begin
    rows = weight_ptr + row.to(tl.int64) * in_features + begin
    if FETCHED:
        fetch(rows[:, None] + tl.minimum(tl.arange(0, FETCHED) * BLOCK, left - 1)[None, :])
        if BLOCKED:
            fetch_block_scales(scale_ptr, row, in_features)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    at_out, stored = tile_outputs(token.to(tl.int64), out_row, num_tokens, size)
    constants = load_constants(
        scale_ptr,
        bias_ptr,
        bias_ptr,
        row_part_ptr,
        row,
        out_row,
        size,
        not BLOCKED,
        BIASED,
        False,
        PARTED,
    )
    live = token < num_tokens
    column = tl.arange(0, BLOCK)[None, :]
    x_rows = x_ptr + (token.to(tl.int64) * in_features)[:, None] + begin
    x_scales = x_scale_ptr + token
    blocks = tl.cdiv(in_features, BLOCK)
    if GATED:  # the tile has rows of two blocks
        first_row = row_tile * (ROWS // 2) + tl.arange(0, 2) * size
    else:
        first_row = row_tile * ROWS
    scales = scale_ptr + first_row // BLOCK * blocks
    block = begin // BLOCK
    if BLOCKED:
        scale = load_block_scales(scales, block, in_features)
    else:
        scale = 1.0
    adapters = 0.0
    if RANK:
        index = load_places(place_ptr, token, num_tokens)
    wait(PDL and not RANK)
    if WEIGHT_FIRST:
        zero = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        zero = tl.zeros([TOKENS, ROWS], tl.float32)
    acc = zero
    x_scale = tl.load(x_scales + block * num_tokens, mask=live, other=0.0)
    for start in tl.range(0, tl.minimum(share, left), BLOCK, num_stages=STAGES):
        at = start + column
        weight = load_once(rows[:, None] + at, at < left, EVEN)
        in_x = live[:, None] if EVEN else live[:, None] & (at < left)
        x = tl.load(x_rows + at, mask=in_x, other=0.0)
        # The scales of the next step come from a cache while this one is multiplied.
        block += 1
        if BLOCKED:
            next_scale = load_block_scales(scales, block, in_features)
        else:
            next_scale = 1.0
        in_next = live & (block < blocks)
        next_x_scale = tl.load(x_scales + block * num_tokens, mask=in_next, other=0.0)
        if BLOCKED and GATED:
            halves = tl.broadcast_to(scale[:, None], [2, ROWS // 2])
            of_rows = tl.reshape(halves, [ROWS])
            of_rows = of_rows[:, None] if WEIGHT_FIRST else of_rows[None, :]
        else:
            of_rows = scale
        of_tokens = x_scale[None, :] if WEIGHT_FIRST else x_scale[:, None]
        if WEIGHT_FIRST:
            acc += of_rows * of_tokens * dot(weight, x, zero)
        else:
            acc += of_rows * of_tokens * dot(x, weight, zero)
        scale, x_scale = next_scale, next_x_scale
    if LATE:
        release(PDL)
    if RANK:
        adapters = load_adapters(block_ptr, used_ptr, index, constants[3])
    wait(PDL and RANK)
    inputs = load_inputs(
        out_ptr, out_ptr, token, at_out, stored, adapters, num_tokens, False, False
    )
    if SPLITS > 1:
        acc, last = sum_of_programs(acc, part_ptr, count_ptr, SPLITS)
        if not last:
            return
    finish(
        acc,
        constants,
        inputs,
        out_ptr,
        out_ptr,
        out_ptr,
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
        0.0,
        not BLOCKED,
        BIASED,
        False,
        False,
        RANK,
        KIND,
        GATED,
        WEIGHT_FIRST,
    )
