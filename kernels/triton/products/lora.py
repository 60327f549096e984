"""LoRA adapters (arXiv:2106.09685): x Aᵀ of each token's own, and what it adds to a product.

A product of few tokens with adapters is two kernels. `shrink` computes x Aᵀ while the product,
which starts as soon as x is there, reads the weight; the end of the product adds x Aᵀ Bᵀ
(`epilogue`). For products by a library, `delta` computes all of it first, and they add to that.

No grid depends on the adapters in use, so a CUDA graph serves any. The programs divide what there
is to do: each multiplies a block of ranks of one adapter's A, for a tile of its tokens, over a
share of the columns. The fewer blocks there are, the smaller are the shares. The last program of an
adapter's tile adds the shares, always in the same order. `shrink` has little shared memory, so that
the programs of the product fit next to its own, and prefetches B for them: adapters are placed
between steps."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..counters import counters
from ..pdl import fetch, release, supported, wait
from .epilogue import RANKS, Delta, dot

RANK_BLOCK = 16  # divisor of the ranks of a slot
WARPS = 4  # of a program: each multiplies a run of COLUMNS columns
COLUMNS = 64
STEP = WARPS * COLUMNS
MULTIPROCESSORS = 132  # number on an H200
PROGRAMS = 2 * MULTIPROCESSORS  # of `shrink`. If there is little to do, half have none of it
MORE_PROGRAMS = 4 * MULTIPROCESSORS  # of `delta`, which no product runs next to
MAX_SPLITS = 32  # programs that share a block
SPLIT_TILES = 8  # tiles of tokens up to which blocks are shared
TOKENS = 64  # tokens among which those of an adapter are found
TILE = 16  # of an adapter's tokens
FACTORS = 4096  # elements of B in a step
STAGES = 3  # steps of B in flight
LINE = 64  # elements of 128 bytes
ROW_CHUNK = 512  # numbers of a table's row that a program changes
RUN = tl.constexpr(128)  # lines of B that a program prefetches at once
MOST_FETCHED = tl.constexpr(2)  # runs


class Factors(NamedTuple):
    """The adapters of a weight, and those that the tokens of a step use. See `Delta`."""

    low: Tensor  # A of each slot, [num_slots, parts * rank, columns] in the type of x
    up: Tensor
    blocks: Tensor
    parts: Tensor
    bounds: Tensor  # int32 [parts + 1], first row of each part, and the number of rows
    places: Tensor
    used: Tensor


def shrink(x: Tensor, factors: Factors) -> Delta:
    """Return x Aᵀ of each token's own adapter, as the end of a product takes it.

    x: `[num_tokens, columns]`, contiguous. Rows without an adapter are left undefined. Sums are in
    fp32, in an order that depends on the shapes and on how many adapters are in use.

    NOTE: on Hopper, A is read before the kernel ahead ends: that kernel must not write it.

    Raises ValueError for other columns, or rows that are not contiguous."""
    _check(x, factors)
    num_tokens, in_features = x.shape
    low_rows, rank = factors.low.shape[1], factors.up.shape[2]
    tiles, tokens, tile = _tiles(num_tokens)
    splits = 1 if tiles > SPLIT_TILES else _num_splits(in_features)
    parts = counts = out = x.new_empty(num_tokens, low_rows)
    if splits > 1:
        parts = torch.empty((splits, num_tokens, low_rows), dtype=torch.float32, device=x.device)
        most = min(num_tokens, len(factors.blocks))
        counts = counters(x.device, tiles * most * (low_rows // RANK_BLOCK))
    pdl = supported(x.device)
    if num_tokens:
        _shrink_kernel[(PROGRAMS,)](
            x,
            factors.low,
            factors.up,
            factors.blocks,
            factors.places,
            factors.used,
            parts,
            counts,
            out,
            num_tokens,
            tiles,
            in_features,
            low_rows,
            low_rows // rank,
            factors.up[0].numel() // LINE,
            splits,
            TOKENS=tokens,
            TILE=tile,
            COLUMNS=COLUMNS,
            WARPS=WARPS,
            SPLITS=triton.next_power_of_2(splits),
            EVEN=in_features % STEP == 0,
            RANK=rank,
            FETCHED=triton.next_power_of_2(max(STEP, min(4 * STEP, -(-in_features // splits)))),
            LINE=LINE,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=WARPS,
        )
    return Delta(out, factors.up, factors.blocks, factors.parts, factors.places, factors.used)


def delta(x: Tensor, factors: Factors) -> Tensor:
    """Return x Aᵀ Bᵀ of each token's own adapter, `[num_tokens, rows]`; zeros if it has none.

    As `shrink` otherwise."""
    _check(x, factors)
    num_tokens, in_features = x.shape
    num_rows, rank = factors.up.shape[1:]
    low_rows = factors.low.shape[1]
    tiles, tokens, tile = _tiles(num_tokens)
    low, out = x.new_empty(num_tokens, low_rows), x.new_empty(num_tokens, num_rows)
    pdl = supported(x.device)
    if num_tokens:
        _delta_kernel[(MORE_PROGRAMS,)](
            x,
            factors.low,
            factors.up,
            factors.blocks,
            factors.bounds,
            factors.places,
            factors.used,
            low,
            out,
            num_tokens,
            tiles,
            in_features,
            low_rows,
            num_rows,
            low_rows // rank,
            TOKENS=tokens,
            TILE=tile,
            COLUMNS=COLUMNS,
            WARPS=WARPS,
            EVEN=in_features % STEP == 0,
            ROWS=max(16, FACTORS // triton.next_power_of_2(rank)),
            STAGES=STAGES,
            RANK=rank,
            RANK_PAD=triton.next_power_of_2(rank),
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=WARPS,
        )
    return out


def add_rows(y: Tensor, ids: Tensor, begin: int, factors: Factors) -> Tensor:
    """Add to rows of a table what the adapters of their tokens add to them. Returns y.

    y: `[num_tokens, size]`; ids: int32 or int64 `[num_tokens]`. A: `[num_slots, rank, rows of the
    table]`, of the tokens from `begin` on; others get nothing. B: `[num_slots, size, rank]`."""
    num_tokens, size = y.shape
    if not y.is_contiguous() or not ids.is_contiguous() or size != factors.up.shape[1]:
        raise ValueError(f"y must be [num_tokens, {factors.up.shape[1]}], contiguous, like ids")
    if num_tokens:
        _rows_kernel[(num_tokens, triton.cdiv(size, ROW_CHUNK))](
            y,
            ids,
            factors.low,
            factors.up,
            factors.blocks,
            factors.places,
            factors.used,
            begin,
            factors.low.shape[2],
            size,
            RANK=factors.up.shape[2],
            CHUNK=ROW_CHUNK,
            num_warps=4,
        )
    return y


def _check(x: Tensor, factors: Factors) -> None:
    if not x.is_contiguous() or x.shape[1] != factors.low.shape[2]:
        raise ValueError(
            f"x must be [num_tokens, {factors.low.shape[2]}], contiguous, not {list(x.shape)}"
        )


def _tiles(num_tokens: int) -> tuple[int, int, int]:
    """Return (number of tiles for each adapter, tokens searched for a tile, tokens of one)."""
    tokens = min(TOKENS, max(8, triton.next_power_of_2(num_tokens)))
    tile = min(TILE, tokens)
    return -(-num_tokens // tokens) * (tokens // tile), tokens, tile


def _num_splits(in_features: int) -> int:
    """Return the most programs that share a block. Each has columns."""
    steps = -(-in_features // STEP)
    return -(-steps // -(-steps // MAX_SPLITS))


@triton.jit
def _unit(item, splits, num_parts, most, num_places):
    """Return (share, block, part, place in `used`, tile) of a program's item. Tiles come last."""
    block = item // splits
    part = block // most
    place = part // num_parts
    return item % splits, block % most, part % num_parts, place % num_places, place // num_places


@triton.jit
def _tile_tokens(own, tile, TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Return (tokens of a tile, which of them are there), of TOKENS tokens of which some are own.

    The n-th tile has the n-th TILE own tokens, in their order."""
    token = tl.arange(0, TOKENS)
    if TILE < TOKENS:
        found = tl.cumsum(own.to(tl.int32), 0) - 1 - tile % (TOKENS // TILE) * TILE
        is_at = own[:, None] & (found[:, None] == tl.arange(0, TILE)[None, :])
        token = tl.sum(tl.where(is_at, token[:, None], 0), 0)
        own = tl.sum(is_at.to(tl.int32), 0) > 0
    return token + tile // (TOKENS // TILE) * TOKENS, own


@triton.jit
def _locate(
    item,
    splits,
    num_parts,
    most,
    num_places,
    block_ptr,
    place_ptr,
    used_ptr,
    num_tokens,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    RANK: tl.constexpr,
):
    """Return (share, slot, rows of A, tokens, which of them are there, whether any is) of an item.

    The rows are those of its block of ranks, in its slot."""
    split, block, part, place, tile = _unit(item, splits, num_parts, most, num_places)
    index = _load_places(place_ptr, tile, num_tokens, TOKENS, TILE)
    slot = tl.load(used_ptr + 2 + place).to(tl.int64)
    token, own = _tile_tokens(index == place, tile, TOKENS, TILE)
    live = (tl.max(own.to(tl.int32)) > 0) & (block < tl.load(block_ptr + slot))
    return split, slot, part * RANK + block * RANKS + tl.arange(0, RANKS), token, own, live


@triton.jit
def _fetch_up(up_ptr, used_ptr, num_used, lines, LINE: tl.constexpr):
    """Prefetch a program's part of B for the product: at most MOST_FETCHED runs of lines."""
    runs = tl.cdiv(lines, RUN)
    for i in tl.static_range(MOST_FETCHED):
        run = tl.program_id(0) + i * tl.num_programs(0)
        if run < num_used * runs:
            slot = tl.load(used_ptr + 2 + run // runs).to(tl.int64)
            line = tl.minimum(run % runs * RUN + tl.arange(0, RUN), lines - 1)
            fetch(up_ptr + (slot * lines + line) * LINE)


@triton.jit(do_not_specialize=["num_tokens", "tiles", "num_parts", "up_lines", "most_splits"])
def _shrink_kernel(
    x_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    place_ptr,
    used_ptr,
    share_ptr,
    count_ptr,
    out_ptr,
    num_tokens,
    tiles,
    in_features,
    low_rows,
    num_parts,
    up_lines,
    most_splits,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    RANK: tl.constexpr,
    FETCHED: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply blocks of A by x.

    NOTE: the product that follows reads x before its `wait`. So each program releases after its
    own."""
    STEP: tl.constexpr = WARPS * COLUMNS
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_used = tl.load(used_ptr)
    some = tl.maximum(num_used, 1)
    most = tl.maximum(tl.load(used_ptr + 1), 1)
    splits = 1
    if SPLITS > 1:
        # Tiles that are not empty, at most. An adapter of few tokens has one.
        filled = tl.minimum(tiles * some, some + num_tokens // TILE) * num_parts * most
        splits = tl.minimum(tl.maximum(num_programs // 2 // filled, 1), most_splits)
    share = tl.cdiv(in_features, STEP * splits) * STEP
    splits = tl.cdiv(in_features, share)
    items = tl.where(num_used > 0, tiles * some * num_parts * most * splits, 0)
    # Found before x is there, since it does not depend on x.
    split, slot, rank, token, own, live = _locate(
        tl.minimum(program, tl.maximum(items - 1, 0)),
        splits,
        num_parts,
        most,
        some,
        block_ptr,
        place_ptr,
        used_ptr,
        num_tokens,
        TOKENS,
        TILE,
        RANK,
    )
    if PDL:
        if live & (program < items):
            line = split * share + tl.arange(0, FETCHED // LINE) * LINE
            line = tl.minimum(line, tl.minimum(split * share + share, in_features) - 1)
            fetch(low_ptr + ((slot * low_rows + rank) * in_features)[:, None] + line[None, :])
        _fetch_up(up_ptr, used_ptr, num_used, up_lines, LINE)
    wait(PDL)
    release(PDL)
    for item in range(program, items, num_programs):
        if live:
            begin = split * share
            acc = _shrink(
                x_ptr + token.to(tl.int64) * in_features,
                low_ptr + (slot * low_rows + rank) * in_features,
                own,
                begin,
                tl.minimum(begin + share, in_features),
                in_features,
                COLUMNS,
                WARPS,
                EVEN,
            )
            _store(
                acc,
                share_ptr,
                count_ptr + item // splits,
                out_ptr,
                (token * low_rows)[None, :] + rank[:, None],
                own,
                split,
                splits,
                num_tokens * low_rows,
                SPLITS,
            )
        if item + num_programs < items:
            split, slot, rank, token, own, live = _locate(
                item + num_programs,
                splits,
                num_parts,
                most,
                some,
                block_ptr,
                place_ptr,
                used_ptr,
                num_tokens,
                TOKENS,
                TILE,
                RANK,
            )


@triton.jit(do_not_specialize=["num_tokens", "tiles", "num_parts"])
def _delta_kernel(
    x_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    bound_ptr,
    place_ptr,
    used_ptr,
    sum_ptr,
    out_ptr,
    num_tokens,
    tiles,
    in_features,
    low_rows,
    num_rows,
    num_parts,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EVEN: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute x Aᵀ Bᵀ of tiles: those of each adapter and, in the last place, of none."""
    num_used = tl.load(used_ptr)
    wait(PDL)
    release(PDL)
    items = tiles * (num_used + 1) * num_parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        _, _, part, place, tile = _unit(item, 1, num_parts, 1, num_used + 1)
        index = _load_places(place_ptr, tile, num_tokens, TOKENS, TILE)
        token = tile // (TOKENS // TILE) * TOKENS + tl.arange(0, TOKENS)
        index = tl.where((index < 0) & (token < num_tokens), num_used, index)
        token, own = _tile_tokens(index == place, tile, TOKENS, TILE)
        if tl.max(own.to(tl.int32)) > 0:
            slot = tl.load(used_ptr + 2 + tl.minimum(place, tl.maximum(num_used - 1, 0)))
            slot = slot.to(tl.int64)
            blocks = tl.where(place < num_used, tl.load(block_ptr + slot), 0)
            at_low = token * low_rows + part * RANK
            for block in range(blocks):
                rank = block * RANKS + tl.arange(0, RANKS)
                acc = _shrink(
                    x_ptr + token.to(tl.int64) * in_features,
                    low_ptr + (slot * low_rows + part * RANK + rank) * in_features,
                    own,
                    0,
                    in_features,
                    in_features,
                    COLUMNS,
                    WARPS,
                    EVEN,
                )
                acc = acc.to(sum_ptr.dtype.element_ty)
                tl.store(sum_ptr + at_low[None, :] + rank[:, None], acc, mask=own[None, :])
            tl.debug_barrier()  # all threads have written
            _expand(
                sum_ptr + at_low,
                up_ptr + slot * num_rows * RANK,
                out_ptr + token.to(tl.int64) * num_rows,
                own,
                tl.load(bound_ptr + part),
                tl.load(bound_ptr + part + 1),
                blocks * RANKS,
                RANK,
                RANK_PAD,
                ROWS,
                STAGES,
            )


@triton.jit
def _load_places(place_ptr, tile, num_tokens, TOKENS: tl.constexpr, TILE: tl.constexpr):
    """Return the places of the tokens that are searched for a tile; -1: no adapter, or no token."""
    token = tile // (TOKENS // TILE) * TOKENS + tl.arange(0, TOKENS)
    return tl.load(place_ptr + token, mask=token < num_tokens, other=-1)


@triton.jit
def _shrink(
    x_rows,
    low_rows,
    own,
    begin,
    end,
    in_features,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Return A xᵀ over columns from begin to end, `[RANKS, tokens]`, of rows at these addresses.

    The next step's columns are loaded while one is multiplied, in registers: shared memory is left
    to the product."""
    STEP: tl.constexpr = WARPS * COLUMNS
    column = (tl.arange(0, WARPS) * COLUMNS)[:, None, None] + tl.arange(0, COLUMNS)[None, None, :]
    lows = low_rows[None, :, None] + column
    xs = x_rows[None, :, None] + column
    own = own[None, :, None]
    left = in_features - column
    acc = tl.zeros([WARPS, low_rows.shape[0], x_rows.shape[0]], tl.float32)
    low = _load_columns(lows + begin, begin < left, EVEN)
    x = tl.load(xs + begin, mask=own if EVEN else own & (begin < left), other=0.0)
    for start in range(begin + STEP, end, STEP):
        next_low = _load_columns(lows + start, start < left, EVEN)
        next_x = tl.load(xs + start, mask=own if EVEN else own & (start < left), other=0.0)
        acc = dot(low, x, acc)
        low = next_low
        x = next_x
    return tl.sum(dot(low, x, acc), 0)


@triton.jit
def _load_columns(pointers, live, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=live, other=0.0)
    return values


@triton.jit
def _store(
    acc, share_ptr, count_ptr, out_ptr, at, own, split, splits, stride, SPLITS: tl.constexpr
):
    """Store a block's sums `[RANKS, tokens]`, of all shares if this program is the last of them."""
    # Loads that do not wait for each other, as many as registers allow.
    AT_ONCE: tl.constexpr = min(SPLITS, 16)
    if SPLITS == 1:  # noqa: SIM114  # `splits` is not known when this is compiled
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=own[None, :])
    elif splits == 1:
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=own[None, :])
    else:
        tl.store(share_ptr + split * stride + at, acc, mask=own[None, :])
        tl.debug_barrier()  # all threads write their share before the count rises
        if tl.atomic_add(count_ptr, 1, sem="acq_rel") == splits - 1:
            tl.store(count_ptr, 0)
            total = tl.zeros_like(acc)
            for first in range(0, splits, AT_ONCE):
                for other in tl.static_range(AT_ONCE):
                    total += tl.load(
                        share_ptr + (first + other) * stride + at,
                        mask=own[None, :] & (first + other < splits),
                        other=0.0,
                        cache_modifier=".cg",
                    )
            tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=own[None, :])


@triton.jit
def _expand(
    lows,
    ups,
    outs,
    own,
    first,
    end,
    num_ranks,
    RANK: tl.constexpr,
    RANK_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Store x Aᵀ Bᵀ for B's rows from first to end. lows, outs: addresses of the tokens' rows."""
    rank = tl.arange(0, RANK_PAD)
    live = rank < num_ranks
    low = tl.load(lows[:, None] + rank[None, :], mask=own[:, None] & live[None, :], other=0.0)
    for start in tl.range(first, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        up = tl.load(
            ups + (row * RANK)[:, None] + rank[None, :],
            mask=(row < end)[:, None] & live[None, :],
            other=0.0,
        )
        y = dot(up, low, tl.zeros([ROWS, lows.shape[0]], tl.float32))
        tl.store(
            outs[None, :] + row[:, None],
            y.to(outs.dtype.element_ty),
            mask=own[None, :] & (row < end)[:, None],
        )


@triton.jit(do_not_specialize=["begin", "rows"])
def _rows_kernel(
    y_ptr,
    id_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    place_ptr,
    used_ptr,
    begin,
    rows,
    size,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Change a chunk of one token's row."""
    token = tl.program_id(0)
    place = tl.load(place_ptr + token)
    index = tl.load(id_ptr + token).to(tl.int64) - begin
    if (place >= 0) & (index >= 0) & (index < rows):
        slot = tl.load(used_ptr + 2 + place).to(tl.int64)
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        at = y_ptr + token.to(tl.int64) * size + column
        rank = tl.arange(0, RANKS)
        lows = low_ptr + (slot * RANK + rank) * rows + index
        ups = up_ptr + ((slot * size + column) * RANK)[:, None] + rank[None, :]
        delta = tl.zeros([CHUNK], tl.float32)
        for block in range(tl.load(block_ptr + slot)):
            low = tl.load(lows + block * RANKS * rows).to(tl.float32)
            up = tl.load(ups + block * RANKS, mask=(column < size)[:, None], other=0.0)
            delta += tl.sum(up.to(tl.float32) * low[None, :], 1)
        y = tl.load(at, mask=column < size, other=0.0).to(tl.float32) + delta
        tl.store(at, y.to(y_ptr.dtype.element_ty), mask=column < size)
