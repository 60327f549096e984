"""Kernels of `experts` of blocks of several tokens."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..activation import gated
from ..pdl import fetch, release, wait
from .expert_products import first_rows, gated_row, product
from .routing import FIELDS

NO_PAIR = tl.constexpr(2**31 - 1)


@triton.jit
def _place(
    id_ptr,
    table_ptr,
    pair_ptr,
    num_tokens,
    num_tiles,
    by_expert,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    FEW: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return (expert, tile of its weight, pairs, which of them exist) of this program.

    Programs of an expert are adjacent, and within them those of a tile. FEW: all tokens are in the
    tile, at most one pair of each. Else pairs are those of a block (`routing.Blocks`)."""
    program = tl.program_id(0)
    lane = tl.arange(0, TOKENS)
    if FEW:
        tile = program % num_tiles
        place = program // num_tiles
        expert = place
        if by_expert == 0:
            expert = tl.load(id_ptr + place)
        choice = tl.arange(0, CHOICES)[None, :]
        at = lane[:, None] * CHOSEN + choice
        exists = (lane < num_tokens)[:, None] & (choice < CHOSEN)
        ids = tl.load(id_ptr + at, mask=exists, other=-1)
        pair = tl.min(tl.where((ids == expert) & (ids >= 0), at, NO_PAIR), 1)
        is_first = (by_expert != 0) | (tl.min(pair, 0) == place)
        live = (pair < NO_PAIR) & is_first
        expert = tl.maximum(expert, 0)
    else:
        entry = table_ptr + program // num_tiles * FIELDS
        expert = tl.load(entry)
        within = program - tl.load(entry + 1) * num_tiles
        blocks = tl.maximum(tl.load(entry + 2), 1)
        tile = within // blocks
        lane += within % blocks * TOKENS
        live = lane < tl.load(entry + 3)
        at = expert.to(tl.int64) * num_tokens + lane
        pair = tl.load(pair_ptr + at, mask=live, other=0)
    return expert.to(tl.int64), tile, tl.where(live, pair, 0).to(tl.int64), live


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "by_expert"])
def up_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    expert_rows,
    step_rows,
    id_ptr,
    table_ptr,
    pair_ptr,
    num_tokens,
    num_tiles,
    by_expert,
    out_ptr,
    size,
    in_features,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    FEW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of act(gate x) * up x, of pairs of one expert."""
    OUTPUTS: tl.constexpr = ROWS // 2
    wait(PDL)
    expert, tile, pair, live = _place(
        id_ptr,
        table_ptr,
        pair_ptr,
        num_tokens,
        num_tiles,
        by_expert,
        CHOSEN,
        CHOICES,
        FEW,
        TOKENS,
    )
    if tl.max(live.to(tl.int32), 0) == 0:
        return
    # Gate and up of an output are 8 rows apart: the tensor cores leave both in one thread.
    lane = tl.arange(0, ROWS)
    output = tl.minimum(tile * OUTPUTS + lane // 16 * 8 + lane % 8, size - 1)
    row = gated_row(output, lane // 8 % 2, size, INTERLEAVED)
    rows, first = first_rows(weight_ptr, expert, row, in_features, expert_rows, WORDS)
    row += expert * (2 * size)
    token = pair // CHOSEN
    acc = product(
        rows,
        first,
        scale_ptr,
        offset_ptr,
        step_rows,
        x_ptr + token * in_features,
        x_scale_ptr + token,
        num_tokens,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        WORDS,
        GROUP,
        SHIFTED,
        STAGES,
        EVEN,
        PARTS,
        FEW,
    )
    release(PDL)
    if FORMAT == "rows":
        acc *= tl.load(scale_ptr + row)[None, :]
    if PARTS == 1 and FORMAT == "rows":
        acc *= tl.load(x_scale_ptr + token, mask=live, other=0.0)[:, None]
    if BIASED:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    pairs = tl.permute(tl.reshape(acc, [TOKENS, ROWS // 16, 2, 8]), [0, 1, 3, 2])
    gate, up = tl.split(pairs)
    y = tl.reshape(gated(gate, up, KIND, LIMIT, ALPHA), [TOKENS, OUTPUTS])
    out_row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    stored = live[:, None] & (out_row < size)[None, :]
    at = (pair * size)[:, None] + out_row[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "by_expert"])
def down_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    offset_ptr,
    bias_ptr,
    expert_rows,
    step_rows,
    id_ptr,
    table_ptr,
    pair_ptr,
    num_tokens,
    num_tiles,
    by_expert,
    share_ptr,
    out_ptr,
    size,
    in_features,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    FEW: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    FORMAT: tl.constexpr,
    WORDS: tl.constexpr,
    GROUP: tl.constexpr,
    SHIFTED: tl.constexpr,
    PARTS: tl.constexpr,
    BIASED: tl.constexpr,
    FETCHED: tl.constexpr,
    LINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute a tile of what pairs of one expert add to their tokens."""
    if FEW:  # the sum has few programs
        release(PDL)
    expert, tile, pair, live = _place(
        id_ptr,
        table_ptr,
        pair_ptr,
        num_tokens,
        num_tiles,
        by_expert,
        CHOSEN,
        CHOICES,
        FEW,
        TOKENS,
    )
    is_used = tl.max(live.to(tl.int32), 0) > 0
    row = tl.minimum(tile * ROWS + tl.arange(0, ROWS), size - 1)
    line = tl.arange(0, FETCHED or 1)
    rows, first = first_rows(weight_ptr, expert, row, in_features, expert_rows, WORDS)
    row += expert * size
    if WORDS:
        steps = tl.minimum(line, tl.cdiv(in_features, COLUMNS) - 1).to(tl.int64)
        line = steps * (step_rows * WORDS)
    else:
        line = tl.minimum(line * LINE, in_features - 1)
    if FETCHED and is_used:
        fetch(rows[:, None] + line[None, :])
    share = tl.load(share_ptr + pair, mask=live, other=0.0)
    wait(PDL)
    if not is_used:
        return
    acc = product(
        rows,
        first,
        scale_ptr,
        offset_ptr,
        step_rows,
        x_ptr + pair * in_features,
        x_scale_ptr + pair,
        num_tokens * CHOSEN,
        live,
        in_features,
        FORMAT,
        COLUMNS,
        WORDS,
        GROUP,
        SHIFTED,
        STAGES,
        EVEN,
        PARTS,
        FEW,
    )
    if not FEW:
        release(PDL)
    if FORMAT == "rows":
        acc *= tl.load(scale_ptr + row)[None, :]
    if PARTS == 1 and FORMAT == "rows":
        acc *= tl.load(x_scale_ptr + pair, mask=live, other=0.0)[:, None]
    if BIASED:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    acc *= share[:, None]
    out_row = tile * ROWS + tl.arange(0, ROWS)
    stored = live[:, None] & (out_row < size)[None, :]
    at = (pair * size)[:, None] + out_row[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=stored)


@triton.jit
def sum_kernel(
    part_ptr,
    id_ptr,
    out_ptr,
    size,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum what the experts of a token computed, in a chunk of columns."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    choice = tl.arange(0, CHOICES)
    pair = token * CHOSEN + choice
    expert = tl.load(id_ptr + pair, mask=choice < CHOSEN, other=-1)
    wait(PDL)
    release(PDL)
    live = (expert >= 0)[:, None] & (column < size)[None, :]
    parts = tl.load(part_ptr + (pair * size)[:, None] + column[None, :], mask=live, other=0.0)
    y = tl.sum(parts.to(tl.float32), 0)
    tl.store(out_ptr + token * size + column, y.to(out_ptr.dtype.element_ty), mask=column < size)
