"""Kernels of `experts`: of one token, and of blocks of several."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from .activation import gated
from .epilogue import dot
from .fp8 import unpacked
from .matmul import like, load_once
from .mxfp4 import product as mxfp4_product
from .pdl import fetch, release, wait
from .routing import FIELDS

NO_PAIR = tl.constexpr(2**31 - 1)

# One token


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
def _gated_row(output, is_up, size, INTERLEAVED: tl.constexpr):
    """Return the weight's row of gate (0) or up (1) of an output."""
    if INTERLEAVED:
        row = 2 * output + is_up
    else:
        row = output + is_up * size
    return row


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
    row = _gated_row(output, lane % 2, size, INTERLEAVED) + expert * (2 * size)
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
    y = gated(gate, up, KIND)
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


# Several tokens


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


@triton.jit
def _product(
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
    """Multiply rows of x by rows of the weight: fp32 `[tokens, rows]`.

    The first operand of the tensor cores is the weight if there are few tokens, since they take 64
    rows of it at a time, and where it is converted, since they take that operand from registers."""
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


@triton.jit(do_not_specialize=["num_tokens", "num_tiles", "by_expert"])
def up_kernel(
    x_ptr,
    x_scale_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
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
    SCALED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MXFP4: tl.constexpr,
    BIASED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
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
    row = _gated_row(output, lane // 8 % 2, size, INTERLEAVED)
    if MXFP4:
        first = expert * (2 * size) * tl.cdiv(in_features, 128) + row
    row += expert * (2 * size)
    token = pair // CHOSEN
    x_rows = x_ptr + token * in_features
    if MXFP4:
        rows = weight_ptr + first * 32
        scales = scale_ptr + first
        acc = mxfp4_product(rows, scales, 2 * size, x_rows, live, in_features, STAGES, EVEN)
    else:
        acc = _product(
            weight_ptr + row * in_features,
            x_rows,
            live,
            in_features,
            COLUMNS,
            STAGES,
            EVEN,
            SCALED,
            QUANTIZED,
            FEW,
        )
    release(PDL)
    if SCALED:
        acc *= tl.load(scale_ptr + row)[None, :]
    if QUANTIZED:
        acc *= tl.load(x_scale_ptr + token, mask=live, other=0.0)[:, None]
    if BIASED:
        acc += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    pairs = tl.permute(tl.reshape(acc, [TOKENS, ROWS // 16, 2, 8]), [0, 1, 3, 2])
    gate, up = tl.split(pairs)
    y = tl.reshape(gated(gate, up, KIND), [TOKENS, OUTPUTS])
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
    bias_ptr,
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
    SCALED: tl.constexpr,
    QUANTIZED: tl.constexpr,
    MXFP4: tl.constexpr,
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
    line = tl.arange(0, FETCHED // LINE if FETCHED else 1)
    if MXFP4:
        steps = tl.cdiv(in_features, 128)
        first = expert * size * steps + row
        rows = weight_ptr + first * 32
        scales = scale_ptr + first
        row += expert * size
        line = tl.minimum(line, steps - 1) * (size * 32)
    else:
        row += expert * size
        rows = weight_ptr + row * in_features
        line = tl.minimum(line * LINE, in_features - 1)
    if FETCHED and is_used:
        fetch(rows[:, None] + line[None, :])
    share = tl.load(share_ptr + pair, mask=live, other=0.0)
    wait(PDL)
    if not is_used:
        return
    x_rows = x_ptr + pair * in_features
    if MXFP4:
        acc = mxfp4_product(rows, scales, size, x_rows, live, in_features, STAGES, EVEN)
    else:
        acc = _product(
            rows, x_rows, live, in_features, COLUMNS, STAGES, EVEN, SCALED, QUANTIZED, FEW
        )
    if not FEW:
        release(PDL)
    if SCALED:
        acc *= tl.load(scale_ptr + row)[None, :]
    if QUANTIZED:
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
