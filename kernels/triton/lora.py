"""LoRA adapters (arXiv:2106.09685): x Aᵀ of each token's own, and sums with products of many rows.

A product with adapters is two kernels. `shrink` computes x Aᵀ, while the weight is prefetched; then
the end of the product adds x Aᵀ Bᵀ (`epilogue`). Above the rows of our own products, `add` is a
third kernel, which also applies the activation.

No grid depends on the adapters in use, so a CUDA graph serves any. The programs of `shrink` divide
what there is to do: each computes a block of ranks of one adapter, for a tile of tokens, over a
share of the columns. The fewer blocks there are, the smaller are the shares. The last program of a
block adds the shares, always in the same order. Reading an adapter is bound by latency, not by
bandwidth: its A is prefetched before the kernel that computes x has ended."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import check_kind
from .counters import counters
from .epilogue import (
    RANKS,
    Delta,
    dot,
    finish,
    load_inputs,
    load_parts,
    tile_outputs,
    tile_rows,
)
from .pdl import fetch, release, supported, wait

RANK_BLOCK = 16  # divisor of the ranks of a slot
WARPS = 4  # of a program: each multiplies a run of COLUMNS columns
COLUMNS = 64
STEP = WARPS * COLUMNS
PROGRAMS = 264  # two for each multiprocessor of an H200
MAX_SPLITS = 32  # programs that share a block
STAGES = 4  # steps in flight
SPLIT_TILES = 8  # tiles of tokens up to which blocks are shared
TILE = 32  # most tokens of a tile of `shrink`. 64 take more registers than there are
ADD_TILE = 64  # tokens of a tile of `add`
ADD_ROWS = 128  # rows of the weight in a tile of `add`


class Factors(NamedTuple):
    """The adapters of a weight, and those that the tokens of a step use. See `Delta`."""

    low: Tensor  # A of each slot, [num_slots, parts * rank, columns] in the type of x
    up: Tensor
    blocks: Tensor
    parts: Tensor
    places: Tensor
    used: Tensor


def shrink(x: Tensor, factors: Factors, *, keeps_splits: bool = False) -> Delta:
    """Return x Aᵀ of each token's own adapter, as the end of a product takes it.

    x: `[num_tokens, columns]`, contiguous. Rows without an adapter are left undefined. Sums are in
    fp32, in an order that depends on the shapes and on how many adapters are in use.
    `keeps_splits`: for kernels of one row, which add the partial sums.

    NOTE: on Hopper, A is read before the kernel ahead ends: that kernel must not write it.

    Raises ValueError for other columns, rows that are not contiguous, and `keeps_splits` with more
    than one token."""
    num_tokens, in_features = x.shape
    low_rows, rank = factors.low.shape[1], factors.up.shape[2]
    if not x.is_contiguous() or in_features != factors.low.shape[2]:
        raise ValueError(
            f"x must be [num_tokens, {factors.low.shape[2]}], contiguous, not {list(x.shape)}"
        )
    if keeps_splits and num_tokens != 1:
        raise ValueError(f"partial sums are kept for one token, not {num_tokens}")
    tokens = min(TILE, max(8, 1 << (num_tokens - 1).bit_length()))
    tiles = -(-num_tokens // tokens)
    splits = _num_splits(in_features) if tiles <= SPLIT_TILES else 1
    parts = counts = out = x.new_empty(num_tokens, low_rows)
    if keeps_splits or splits > 1:
        parts = torch.empty((splits, num_tokens, low_rows), dtype=torch.float32, device=x.device)
    if keeps_splits:
        programs = splits * (low_rows // RANK_BLOCK)
        out = parts
    else:
        programs = PROGRAMS
        if splits > 1:
            most = min(num_tokens, len(factors.blocks))
            counts = counters(x.device, tiles * most * (low_rows // RANK_BLOCK))
    pdl = supported(x.device)
    if num_tokens:
        _shrink_kernel[(programs,)](
            x,
            factors.low,
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
            splits,
            TOKENS=1 if keeps_splits else tokens,
            COLUMNS=COLUMNS,
            WARPS=WARPS,
            SPLITS=_power_of_two(splits),
            STAGES=STAGES,
            FETCHED=max(STEP, min(4 * STEP, _power_of_two(-(-in_features // splits))))
            if pdl
            else 0,
            EVEN=in_features % STEP == 0,
            RANK=rank,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=WARPS,
        )
    return Delta(out[:, 0] if keeps_splits else out, *factors[1:])


def add(
    y: Tensor,
    delta: Delta,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return act(y + delta), or act(gate) * up of rows gate | up.

    y: a product with its bias, `[num_tokens, rows of the weight]`, contiguous. Without an
    activation the delta is added in place, unless `out` is given.

    Raises ValueError for rows that are not contiguous, or an unknown activation."""
    num_tokens, num_rows = y.shape
    if not y.is_contiguous() or num_rows != delta.up.shape[1]:
        raise ValueError(
            f"y must be [num_tokens, {delta.up.shape[1]}], contiguous, not {list(y.shape)}"
        )
    if activation is not None:
        check_kind(activation)
    size = num_rows // 2 if gated else num_rows
    if out is None:
        out = y if activation is None and not gated else y.new_empty(num_tokens, size)
    tile = ADD_ROWS // 2 if gated else ADD_ROWS
    pdl = supported(y.device)
    if num_tokens:
        _add_kernel[(-(-size // tile), -(-num_tokens // ADD_TILE))](
            y,
            out,
            *delta,
            num_tokens,
            size,
            delta.low.shape[-1],
            TOKENS=ADD_TILE,
            ROWS=ADD_ROWS,
            KIND=activation or "",
            GATED=gated,
            IN_PLACE=out is y,
            RANK=delta.rank,
            PARTED=delta.has_parts,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=8,
        )
    return out


def _num_splits(in_features: int) -> int:
    """Return the most programs that share a block. Each has columns."""
    steps = -(-in_features // STEP)
    return -(-steps // -(-steps // MAX_SPLITS))


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


@triton.jit
def _unit(item, splits, num_parts, most, num_used):
    """Return (share, block, part, place in `used`, tile) of a program's item."""
    block = item // splits
    part = block // most
    place = part // num_parts
    return item % splits, block % most, part % num_parts, place % num_used, place // num_used


@triton.jit(do_not_specialize=["num_tokens", "tiles", "num_parts", "most_splits"])
def _shrink_kernel(
    x_ptr,
    low_ptr,
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
    most_splits,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WARPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    EVEN: tl.constexpr,
    RANK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply blocks of A by x. With one token its shares are stored as they are."""
    ONE: tl.constexpr = TOKENS == 1
    STEP: tl.constexpr = WARPS * COLUMNS
    if ONE:  # the next kernel has many programs, which need not spread evenly
        release(PDL)
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_used = tl.load(used_ptr)
    some = tl.maximum(num_used, 1)
    most = tl.maximum(tl.load(used_ptr + 1), 1)
    units = tiles * some * num_parts * most
    if ONE:
        splits = most_splits
    else:
        splits = tl.minimum(tl.maximum(num_programs // units, 1), most_splits)
    share = tl.cdiv(in_features, STEP * splits) * STEP
    splits = tl.cdiv(in_features, share)
    items = tl.where(num_used > 0, units * splits, 0)
    if FETCHED:
        split, block, part, place, tile = _unit(
            tl.minimum(program, tl.maximum(items - 1, 0)), splits, num_parts, most, some
        )
        slot = tl.load(used_ptr + 2 + place).to(tl.int64)
        if (program < items) & (block < tl.load(block_ptr + slot)):
            rank = part * RANK + block * RANKS + tl.arange(0, RANKS)
            line = split * share + tl.arange(0, FETCHED // COLUMNS) * COLUMNS
            line = tl.minimum(line, tl.minimum(split * share + share, in_features) - 1)
            fetch(low_ptr + ((slot * low_rows + rank) * in_features)[:, None] + line[None, :])
    wait(PDL)
    if not ONE:
        release(PDL)
    for item in range(program, items, num_programs):
        split, block, part, place, tile = _unit(item, splits, num_parts, most, some)
        slot = tl.load(used_ptr + 2 + place).to(tl.int64)
        token = tile * TOKENS + tl.arange(0, TOKENS)
        own = tl.load(place_ptr + token, mask=token < num_tokens, other=-1) == place
        is_used = tl.max(own.to(tl.int32)) > 0
        if is_used & (block < tl.load(block_ptr + slot)):
            rank = part * RANK + block * RANKS + tl.arange(0, RANKS)
            rows = low_ptr + (slot * low_rows + rank) * in_features
            begin = split * share
            end = tl.minimum(begin + share, in_features)
            if ONE:
                column = tl.arange(0, STEP)[None, :]
                acc = tl.zeros([RANKS, STEP // 8], tl.float32)
                for start in range(begin, end, STEP):
                    at = start + column
                    low = _load(rows[:, None] + at, at < in_features, EVEN)
                    # Loaded for each rank, and summed by eight within each thread, so that no
                    # number moves between threads.
                    x = _load(x_ptr + at + (rank * 0)[:, None], at < in_features, EVEN)
                    products = low.to(tl.float32) * x.to(tl.float32)
                    acc += tl.sum(tl.reshape(products, [RANKS, STEP // 8, 8]), 2)
                tl.store(out_ptr + split * low_rows + rank, tl.sum(acc, 1))
            else:
                column = (tl.arange(0, WARPS) * COLUMNS)[:, None, None] + tl.arange(0, COLUMNS)[
                    None, None, :
                ]
                x_rows = x_ptr + token.to(tl.int64)[None, :, None] * in_features
                acc = tl.zeros([WARPS, RANKS, TOKENS], tl.float32)
                for start in tl.range(begin, end, STEP, num_stages=STAGES):
                    at = start + column
                    low = _load(rows[None, :, None] + at, at < in_features, EVEN)
                    live = own[None, :, None] if EVEN else own[None, :, None] & (at < in_features)
                    x = tl.load(x_rows + at, mask=live, other=0.0)
                    acc = dot(low, x, acc)
                _store(
                    tl.sum(acc, 0),
                    share_ptr,
                    count_ptr + item // splits,
                    out_ptr,
                    token[None, :] * low_rows + rank[:, None],
                    own,
                    split,
                    splits,
                    num_tokens * low_rows,
                    SPLITS,
                )


@triton.jit
def _load(pointers, live, EVEN: tl.constexpr):
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
    AT_ONCE: tl.constexpr = SPLITS if acc.shape[1] <= 16 else 8
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


@triton.jit(do_not_specialize=["num_tokens"])
def _add_kernel(
    y_ptr,
    out_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    row_part_ptr,
    place_ptr,
    used_ptr,
    num_tokens,
    size,
    low_stride,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    IN_PLACE: tl.constexpr,
    RANK: tl.constexpr,
    PARTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finish a tile of a product: `epilogue.finish`."""
    row, out_row = tile_rows(size, ROWS, GATED)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    at_out, stored = tile_outputs(token, out_row, num_tokens, size)
    part = load_parts(row_part_ptr + row, PARTED, ROWS)
    wait(PDL)
    release(PDL)
    inputs = load_inputs(
        y_ptr,
        y_ptr,
        block_ptr,
        place_ptr,
        used_ptr,
        token,
        at_out,
        stored,
        part,
        num_tokens,
        False,
        False,
        RANK,
    )
    adapters = inputs[2]
    if IN_PLACE:  # noqa: SIM102  # the other condition is not known when this is compiled
        if adapters[2] == 0:  # no token of the tile has an adapter
            return
    num_rows = 2 * size if GATED else size
    acc = tl.load(
        y_ptr + (token * num_rows)[:, None] + row[None, :],
        mask=(token < num_tokens)[:, None],
        other=0.0,
    ).to(tl.float32)
    finish(
        acc,
        (0.0, 0.0, 0.0, part),
        inputs,
        out_ptr,
        y_ptr,
        y_ptr,
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
        size,
        low_stride,
        0.0,
        False,
        False,
        False,
        False,
        RANK,
        KIND,
        GATED,
        False,
    )
