"""Products of up to 64 rows with a weight, in tiles of the tensor cores.

Such a product is bound by reading the weight once and, from the L2 cache, x once per tile. So tiles
are as large as still fills the GPU, and as much of the weight as fits into shared memory is in
flight. If large tiles are too few, either the warps of a program divide the columns of a smaller
tile, or several programs divide the columns of a tile: the last program to finish then adds their
sums, always in the same order. The weight has the type of x, or is FP8 and converted in registers;
if it has a scale for each block, the sums of each step of columns are scaled.
An RMS norm between two products is fused into both: the first computes the sums of squares of its
columns, and the second divides by their root mean square. See `epilogue` for what follows the
loop."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import FP8_BLOCK

from ..counters import counters
from ..pdl import fetch, release, supported, wait
from .epilogue import (
    INTERPRETED,
    Delta,
    Norm,
    dot,
    finish,
    load_adapters,
    load_constants,
    load_inputs,
    load_places,
    tile_outputs,
    tile_rows,
)

MAX_TOKENS = 64  # most rows of x in a tile
ROW_CLASSES = (1, 8, 16, 32, 48, MAX_TOKENS)
"""The most rows of x for which each kernel is chosen, here, in `linear`, `fp8` and `grouped`."""
COLUMNS = 128  # columns per step of the loop and per part
BLOCK = tl.constexpr(FP8_BLOCK)
MULTIPROCESSORS = 132  # number on an H200
ENOUGH = 72  # programs that keep more than half of them busy


class Tile(NamedTuple):
    """The shape of one program."""

    rows: int  # of the weight
    stages: int  # steps of the loop in flight, if shared memory allows
    parts: int = 1  # runs of columns, each for one warp; their sums are added at the end
    splits: int = 1  # programs that share a tile


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Rows of an RMS norm, not yet divided by their root mean square.

    The next product scales its sums instead, so no kernel has to run between the two products."""

    x: Tensor  # [num_tokens, size], multiplied by the norm's weight
    square_sums: Tensor  # fp64 [num_tokens], of each row before that multiplication
    eps: float

    def __len__(self) -> int:
        return len(self.x)

    @property
    def device(self) -> torch.device:
        return self.x.device


def matmul(
    x: Tensor | Unscaled,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    tile: Tile | None = None,
    delta: Delta | None = None,
) -> Tensor:
    """Compute `linear.linear`, or `fp8.linear` with a scale, for up to MAX_TOKENS tokens.

    These functions check the arguments. `delta` is added before bias, activation and gate."""
    _run(x, weight, scale, bias, activation, gated, out, None, tile, delta)
    return out


def add_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Norm,
    tile: Tile | None = None,
    delta: Delta | None = None,
) -> Unscaled:
    """Compute `linear.add_norm`, which checks the arguments."""
    out = torch.empty_like(norm.residual)
    _run(x, weight, None, bias, None, False, out, norm, tile, delta)
    return Unscaled(out, norm.square_sums, norm.eps)


def _run(
    x: Tensor | Unscaled,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    norm: Norm | None,
    tile: Tile | None,
    delta: Delta | None,
) -> None:
    scaled, given, eps = True, out, 0.0
    if isinstance(x, Unscaled):
        scaled, given, eps, x = False, x.square_sums, x.eps, x.x
    num_tokens, in_features = x.shape
    num_rows = weight.shape[0]
    best = best_tile if scale is None else best_tile_of_fp8
    tile = tile or best(num_tokens, num_rows, in_features)
    tokens = _padded(num_tokens, tile)
    step = COLUMNS * tile.parts
    stages = min(
        tile.stages,
        shared_memory(x.device) // (step * (tokens * x.itemsize + tile.rows * weight.itemsize)),
    )
    num_tiles = -(-num_rows // tile.rows)
    share = -(-in_features // (step * tile.splits)) * step
    parts = counts = out
    if tile.splits > 1:
        shape = (tile.splits, num_tiles, tokens, tile.rows)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        counts = counters(x.device, num_tiles)
    pdl = supported(x.device)
    _tile_kernel[(num_tiles, tile.splits)](
        x,
        weight,
        weight if scale is None else scale,
        weight if bias is None else bias,
        out,
        parts,
        counts,
        given,
        eps,
        out if norm is None else norm.residual,
        out if norm is None else norm.weight,
        out if norm is None else norm.square_sums,
        *(delta or (out,) * len(Delta._fields)),
        num_tokens,
        num_rows // 2 if gated else num_rows,
        in_features,
        0 if delta is None else delta.low.shape[-1],
        share,
        TOKENS=tokens,
        ROWS=tile.rows,
        COLUMNS=COLUMNS,
        PARTS=tile.parts,
        SPLITS=tile.splits,
        STAGES=max(1, stages),
        FETCHED=max(2 * COLUMNS, step) if pdl else 0,
        LINE=128 // weight.itemsize,
        EVEN=in_features % step == 0,
        SCALED=scale is not None,
        BLOCKED=scale is not None and scale.dim() == 2,
        BIASED=bias is not None,
        KIND=activation or "",
        GATED=gated,
        UNSCALED=not scaled,
        LATE=late(num_tokens, activation, gated, norm is not None),
        NORMED=norm is not None,
        RANK=0 if delta is None else delta.rank,
        PARTED=delta is not None and delta.has_parts,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4 if tile.parts == 1 else tile.parts,
    )


def best_tile(num_tokens: int, num_rows: int, in_features: int) -> Tile:
    """Return the fastest tile on an H200, measured in chains of norms and products.

    Few shapes suffice to come close to the best of each size."""
    if num_rows > 64 * MULTIPROCESSORS:
        large, small = _busy(num_rows, 128), _busy(num_rows, 64)
        return Tile(64, stages=6) if large < 0.65 and large < small else Tile(128, stages=4)
    if num_tokens <= 16 and num_rows <= 1024 <= in_features:
        return Tile(16, stages=4, parts=4) if num_tokens <= 8 else Tile(8, stages=6, parts=4)
    if num_tokens <= 8 and num_rows <= (4096 if in_features >= 2048 else 3072):
        return Tile(16, stages=5, parts=2)
    if num_tokens <= 16 and num_rows <= 1024:
        return Tile(8, stages=5, parts=2)
    if in_features >= 8192 and 1024 < num_rows <= 64 * MULTIPROCESSORS // 3:
        return Tile(64, stages=6, splits=3)
    if num_tokens <= 32 and num_rows > 1024:
        return Tile(64, stages=8 if in_features >= 4096 else 6)
    if num_rows >= 64 * ENOUGH:
        return Tile(64, stages=6)
    if num_tokens <= 32 and in_features >= 2048:
        return Tile(64, stages=6, splits=4)
    if in_features >= 8192:  # x is long, so it is read fewer times
        return Tile(64, stages=5, splits=2)
    programs = -(-num_rows // 32)
    splits = next(
        (n for n in (4, 2) if programs * n <= MULTIPROCESSORS and in_features >= 512 * n), 1
    )
    return Tile(32, stages=6, splits=splits)


def _busy(num_rows: int, rows: int) -> float:
    """Return the share of the multiprocessors' time in which tiles of so many rows keep them busy.

    Each has one at a time."""
    num_tiles = -(-num_rows // rows)
    return num_tiles / (-(-num_tiles // MULTIPROCESSORS) * MULTIPROCESSORS)


def best_tile_of_fp8(num_tokens: int, num_rows: int, in_features: int) -> Tile:
    """Return the fastest tile for an FP8 weight. Smaller ones hide its conversion better."""
    if num_tokens > 16:
        return Tile(32, stages=8)
    rows = 16 if num_tokens <= 8 or num_rows <= 1024 else 32
    return Tile(rows, stages=4, parts=2) if num_rows > 4096 else Tile(rows, stages=6, parts=4)


def late(num_tokens: int, activation: str | None, gated: bool, normed: bool) -> bool:
    """Return True if the next kernel may start only when the weight has been read.

    Kernels of many programs would crowd on the multiprocessors that this one leaves free. Chosen by
    timing chains with the kernel that follows in a model: a product or attention."""
    if gated or normed:
        return True
    if activation is not None:
        return num_tokens <= 8
    return 16 < num_tokens <= 48  # attention over more fills the GPU


def _padded(num_tokens: int, tile: Tile) -> int:
    """Return the rows of x in a tile. Without parts, one side needs 64 for the full tensor rate."""
    if tile.parts == 1 and tile.rows < 64:
        return MAX_TOKENS
    least = 16 if tile.parts == 1 or tile.rows < 16 else 8
    return max(least, 1 << (num_tokens - 1).bit_length())


@cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory for a program's tiles."""
    if device.type != "cuda":
        return 0
    properties = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # stubs
    return limit - 1024  # a reserve for other uses


@triton.jit
def like(weight, DTYPE: tl.constexpr):
    """Convert e4m3 to the type of x. For bf16 the compiler's own code has a quarter of the rate."""
    if DTYPE.is_bf16() and not INTERPRETED:
        weight = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            .reg .f32 wide_a, wide_b, wide_c, wide_d;
            mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 wide_a, a;
            cvt.f32.f16 wide_b, b;
            cvt.f32.f16 wide_c, c;
            cvt.f32.f16 wide_d, d;
            cvt.rn.bf16x2.f32 $0, wide_b, wide_a;
            cvt.rn.bf16x2.f32 $1, wide_d, wide_c;
            }""",
            "=r,=r,r",
            [weight.to(tl.uint8, bitcast=True)],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return weight.to(DTYPE)


@triton.jit
def load_once(pointers, live, EVEN: tl.constexpr):
    """Load a tile of the weight, which is not read again soon."""
    if EVEN:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=live, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def fetch_block_scales(scale_ptr, row, columns):
    """Prefetch the scales of the blocks of some rows: up to 256 of each."""
    blocks = tl.cdiv(columns, BLOCK)
    block = tl.minimum(tl.arange(0, 8) * 32, blocks - 1)
    fetch(scale_ptr + (row // BLOCK * blocks)[:, None] + block[None, :])


@triton.jit
def load_block_scales(pointers, block, columns):
    """Load the scales of blocks of columns. Absent blocks have 0."""
    return tl.load(pointers + block, mask=block < tl.cdiv(columns, BLOCK), other=0.0)


@triton.jit
def sum_of_programs(acc, part_ptr, count_ptr, SPLITS: tl.constexpr):
    """Return (sum over the tile's programs, whether this is the last to arrive)."""
    tile = tl.program_id(0)
    at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    stride = tl.num_programs(0) * (acc.shape[0] * acc.shape[1])
    part_ptr += tile * (acc.shape[0] * acc.shape[1])
    tl.store(part_ptr + tl.program_id(1) * stride + at, acc)
    tl.debug_barrier()  # all threads write their part before the count rises
    last = tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    if last:
        tl.store(count_ptr + tile, 0)
        acc = tl.zeros_like(acc)
        for split in tl.static_range(SPLITS):
            acc += tl.load(part_ptr + split * stride + at, cache_modifier=".cg")
    return acc, last


@triton.jit(do_not_specialize=["num_tokens"])
def _tile_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    given_ptr,
    eps,
    residual_ptr,
    norm_ptr,
    found_ptr,
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
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    LINE: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    UNSCALED: tl.constexpr,
    LATE: tl.constexpr,
    NORMED: tl.constexpr,
    RANK: tl.constexpr,
    PARTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply x by ROWS rows of the weight, over `share` of its columns.

    Tiles are `[tokens or rows, columns]`, with several parts `[parts, ..., columns]`.

    The first operand of the product is the one with 64 rows, if any: the tensor cores take as many
    at a time, and read them again for each run of the second. Otherwise it is the longer one."""
    if not LATE:
        release(PDL)
    WEIGHT_FIRST: tl.constexpr = ROWS == 64 or (TOKENS < 64 and ROWS >= TOKENS)
    FIRST: tl.constexpr = ROWS if WEIGHT_FIRST else TOKENS
    SECOND: tl.constexpr = TOKENS if WEIGHT_FIRST else ROWS
    row, out_row = tile_rows(size, ROWS, GATED)
    begin = tl.program_id(1) * share
    left = in_features - begin
    rows = weight_ptr + row.to(tl.int64) * in_features + begin
    if FETCHED:
        fetch(rows[:, None] + tl.minimum(tl.arange(0, FETCHED // LINE) * LINE, left - 1)[None, :])
    token = tl.arange(0, TOKENS)
    at_out, stored = tile_outputs(token, out_row, num_tokens, size)
    constants = load_constants(
        scale_ptr,
        bias_ptr,
        norm_ptr,
        row_part_ptr,
        row,
        out_row,
        size,
        SCALED and not BLOCKED,
        BIASED,
        NORMED,
        PARTED,
    )
    x_rows = x_ptr + token * in_features + begin
    scales = scale_ptr + row // BLOCK * tl.cdiv(in_features, BLOCK)  # if BLOCKED
    if PARTS == 1:
        column = tl.arange(0, COLUMNS)[None, :]
        rows = rows[:, None]
        x_rows = x_rows[:, None]
        in_x = (token < num_tokens)[:, None]
        zero = tl.zeros([FIRST, SECOND], tl.float32)
        scales = scales[:, None] if WEIGHT_FIRST else scales[None, :]
        block = begin // BLOCK
    else:
        part = tl.arange(0, PARTS)[:, None, None]
        column = part * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        rows = rows[None, :, None]
        x_rows = x_rows[None, :, None]
        in_x = (token < num_tokens)[None, :, None]
        zero = tl.zeros([PARTS, FIRST, SECOND], tl.float32)
        scales = scales[None, :, None] if WEIGHT_FIRST else scales[None, None, :]
        block = begin // BLOCK + part
    acc = zero
    if BLOCKED:
        tl.static_assert(COLUMNS == BLOCK)
        if FETCHED:
            fetch_block_scales(scale_ptr, row, in_features)
        scale = load_block_scales(scales, block, in_features)
    adapters = 0.0
    if RANK:
        index = load_places(place_ptr, token, num_tokens)
    wait(PDL and not RANK)
    if not RANK:
        inputs = load_inputs(
            given_ptr, residual_ptr, token, at_out, stored, adapters, num_tokens, UNSCALED, NORMED
        )
    for start in tl.range(0, tl.minimum(share, left), PARTS * COLUMNS, num_stages=STAGES):
        at = start + column
        weight = load_once(rows + at, at < left, EVEN)
        x = tl.load(x_rows + at, mask=in_x if EVEN else in_x & (at < left), other=0.0)
        if SCALED:
            weight = like(weight, x.dtype)
        first, second = (weight, x) if WEIGHT_FIRST else (x, weight)
        if BLOCKED:
            # The scales of the next step come from a cache while this one is multiplied.
            block += PARTS
            next_scale = load_block_scales(scales, block, in_features)
            acc += scale * dot(first, second, zero)
            scale = next_scale
        else:
            acc = dot(first, second, acc)
    if LATE:
        release(PDL)
    if RANK:
        adapters = load_adapters(block_ptr, used_ptr, index, constants[3])
    wait(PDL and RANK)
    if RANK:
        inputs = load_inputs(
            given_ptr, residual_ptr, token, at_out, stored, adapters, num_tokens, UNSCALED, NORMED
        )
    if PARTS > 1:
        acc = tl.sum(acc, 0)
    if SPLITS > 1:
        acc, last = sum_of_programs(acc, part_ptr, count_ptr, SPLITS)
        if not last:
            return
    finish(
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
        SCALED and not BLOCKED,
        BIASED,
        UNSCALED,
        NORMED,
        RANK,
        KIND,
        GATED,
        WEIGHT_FIRST,
    )
