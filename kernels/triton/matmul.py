"""Products of up to 64 rows with a weight, in tiles of the tensor cores.

Such a product is bound by reading the weight once and, from the L2 cache, x once per tile. So tiles are as large as still
fills the GPU; where that takes it, several programs share a tile, each with some of the columns, and the last to come
adds up what they have, in the same order whoever it is.
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import apply
from .pdl import fetch, release, supported, wait

TOKENS = 64
"""Rows of x that a tile holds."""
COLUMNS = 128
"""Columns per step of a program's loop: those of the weight are a multiple."""
FETCHED = 512
"""Columns asked for, into the L2 cache, before the kernel waits."""
MULTIPROCESSORS = 132
"""An H200's."""
ENOUGH = 72
"""Programs that keep more than half of them busy."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    """The shape of one program."""

    rows: int
    """Rows of the weight."""
    splits: int
    """Programs that share a tile."""
    stages: int


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    tile: Tile | None = None,
) -> Tensor:
    """As `linear.linear`, which checks the arguments, for up to TOKENS tokens and a multiple of COLUMNS columns."""
    num_tokens, in_features = x.shape
    tile = tile or best_tile(weight.shape[0], in_features)
    tile = tile._replace(stages=min(tile.stages, _most_stages(tile.rows, x.device)))
    num_tiles = -(-weight.shape[0] // tile.rows)
    share = -(-in_features // (COLUMNS * tile.splits)) * COLUMNS
    parts = counts = out
    if tile.splits > 1:
        shape = (tile.splits, num_tiles, TOKENS, tile.rows)
        parts, counts = torch.empty(shape, dtype=torch.float32, device=x.device), _counts(x.device)
    pdl = supported(x.device)
    _tile_kernel[(num_tiles, tile.splits)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        parts,
        counts,
        num_tokens,
        weight.shape[0] // 2 if gated else weight.shape[0],
        in_features,
        share,
        TOKENS=TOKENS,
        ROWS=tile.rows,
        COLUMNS=COLUMNS,
        SPLITS=tile.splits,
        STAGES=tile.stages,
        FETCHED=FETCHED if pdl else 0,
        BIASED=bias is not None,
        KIND=activation or "",
        GATED=gated,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


def best_tile(num_rows: int, in_features: int) -> Tile:
    """The fastest shapes measured on an H200 in chains of norms and products of 64 rows, as few as come near the best of each size: one
    program on every multiprocessor, with as much of the weight on its way as fits there.
    """
    if num_rows > 64 * MULTIPROCESSORS:
        return Tile(128, 1, stages=4)
    if num_rows >= 64 * ENOUGH:
        return Tile(64, 1, stages=5)
    if in_features >= 8192:  # x is long: better to read it fewer times
        return Tile(64, 2, stages=5)
    programs = -(-num_rows // 32)
    splits = next((n for n in (4, 2) if programs * n <= MULTIPROCESSORS and in_features >= 512 * n), 1)
    return Tile(32, splits, stages=6)


@cache
def _most_stages(rows: int, device: torch.device) -> int:
    """As many as there is shared memory for, a little of which is for other things."""
    if device.type != "cuda":
        return 1
    shared: int = torch.cuda.get_device_properties(device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    return max(1, (shared - 1024) // ((TOKENS + rows) * COLUMNS * 2))


@cache
def _counts(device: torch.device) -> Tensor:
    """How many programs of each tile have come: 0 between kernels."""
    return torch.zeros(4096, dtype=torch.int32, device=device)


@triton.jit
def _dot(x, weight, acc):
    """x @ weightᵀ + acc in fp32. The interpreter multiplies bf16 numbers' bits, so it gets them widened."""
    if INTERPRETED:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    return tl.dot(x, tl.trans(weight), acc, input_precision="ieee")


@triton.jit
def _sum_of_parts(acc, part_ptr, count_ptr, SPLITS: tl.constexpr):
    """(the sum of what the tile's programs have, whether this is the last of them to come)."""
    tile = tl.program_id(0)
    at = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    stride = tl.num_programs(0) * (acc.shape[0] * acc.shape[1])
    part_ptr += tile * (acc.shape[0] * acc.shape[1])
    tl.store(part_ptr + tl.program_id(1) * stride + at, acc)
    tl.debug_barrier()  # every thread's part is written before the count says so
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
    bias_ptr,
    out_ptr,
    part_ptr,
    count_ptr,
    num_tokens,
    size,
    in_features,
    share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows of the weight, of which half are of gate and half of up if GATED, over `share` of its columns.

    Rows past the last one are the last one again.
    """
    release(PDL)
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    lane = tl.arange(0, ROWS)
    row = tl.minimum(tl.program_id(0) * OUTPUTS + lane % OUTPUTS, size - 1)
    if GATED:
        row += lane // OUTPUTS * size
    weight_rows = weight_ptr + (row.to(tl.int64) * in_features)[:, None]
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, in_features)
    if FETCHED:
        fetch(weight_rows + tl.minimum(begin + tl.arange(0, FETCHED // 64) * 64, end - 1)[None, :])
    if BIASED:
        bias = tl.load(bias_ptr + row).to(tl.float32)
    token = tl.arange(0, TOKENS)
    x_rows = x_ptr + (token * in_features)[:, None]
    in_x = (token < num_tokens)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    acc = tl.zeros([TOKENS, ROWS], tl.float32)
    wait(PDL)
    for start in tl.range(begin, end, COLUMNS, num_stages=STAGES):
        weight = tl.load(weight_rows + start + column, eviction_policy="evict_first")
        x = tl.load(x_rows + start + column, mask=in_x, other=0.0)
        acc = _dot(x, weight, acc)
    if SPLITS > 1:
        acc, last = _sum_of_parts(acc, part_ptr, count_ptr, SPLITS)
        if not last:
            return
    if BIASED:
        acc += bias[None, :]
    if GATED:
        y, up = tl.split(tl.permute(tl.reshape(acc, [TOKENS, 2, OUTPUTS]), [0, 2, 1]))
    else:
        y = acc
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= up
    out_row = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    out = out_ptr + (token * size)[:, None] + out_row[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=in_x & (out_row < size)[None, :])
