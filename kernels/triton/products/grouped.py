"""Products with weights that have a scale for each group of columns: int4 and int8.

Products of few rows are bound by reading the weight, so it is converted in registers and x stays in
16 bits. One loop serves all formats: it multiplies a step of columns by the tensor cores, then
scales the sums, so scales keep their precision. Offsets are multiplied by the sums of x, which are
a product with ones. For many rows the weight is expanded to the type of x for cuBLAS.

A tile of words becomes several operands of adjacent columns, its planes (`grouped_layout`), by
arithmetic alone: no number moves between threads. See `epilogue` for what follows the loop."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import check_kind
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
from .grouped_layout import Grouped
from .matmul import MULTIPROCESSORS, Tile, Unscaled, late, load_once, shared_memory, sum_of_programs

TOKENS = 64  # most rows of x in a tile
FEW_TOKENS = 16


def linear(
    x: Tensor | Unscaled,
    weight: Grouped,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    *,
    tile: Tile | None = None,
    delta: Delta | None = None,
) -> Tensor:
    """Return act(x Wᵀ + b), or act(gate) * up if W holds gate's rows, then up's.

    x: `[num_tokens, in]`, contiguous, in 16 bits, or a result of `add_norm`; bias: one per row of
    the weight. Sums are in fp32, in an order that depends on the shapes alone. Returns
    `[num_tokens, size]`, which is `out` if that is given.

    NOTE: on Hopper the kernel reads the weight before the kernel ahead of it ends, like
    `linear.linear`.

    Raises ValueError for an unknown activation, other columns, or rows that are not contiguous."""
    rows = x.x if isinstance(x, Unscaled) else x
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if activation is not None:
        check_kind(activation)
    _check(rows, weight)
    if out is None:
        out = torch.empty((len(rows), size), dtype=rows.dtype, device=rows.device)
    if len(rows):
        _run(x, weight, bias, activation, gated, out, None, tile, delta)
    return out


def add_norm(
    x: Tensor,
    weight: Grouped,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    square_sums: Tensor,
    bias: Tensor | None = None,
    *,
    tile: Tile | None = None,
    delta: Delta | None = None,
) -> Unscaled:
    """Compute `linear.add_norm` with such a weight, for any number of tokens. Not in fp16."""
    _check(x, weight)
    if not residual.is_contiguous() or residual.shape != (len(x), weight.shape[0]):
        raise ValueError(
            f"the residual must be [{len(x)}, {weight.shape[0]}], contiguous, "
            f"not {list(residual.shape)}"
        )
    if x.dtype == torch.float16:
        raise ValueError("rows that are not scaled yet may overflow float16")
    out = torch.empty_like(residual)
    norm = Norm(residual, norm_weight, eps, square_sums)
    _run(x, weight, bias, None, False, out, norm, tile, delta)
    return Unscaled(out, square_sums, eps)


def _check(x: Tensor, weight: Grouped) -> None:
    if not x.is_contiguous() or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x must be [num_tokens, {weight.shape[1]}], contiguous, not {list(x.shape)}"
        )
    if x.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"x must be bfloat16 or float16, not {x.dtype}")


def _run(
    x: Tensor | Unscaled,
    weight: Grouped,
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
    num_tokens, (num_rows, in_features) = len(x), weight.shape
    tile = tile or best_tile(weight, num_tokens)
    tokens = max(8, 1 << (min(num_tokens, TOKENS) - 1).bit_length())
    columns = weight.columns
    step = columns * tile.parts
    nbytes = columns * weight.bits // 8
    stages = min(
        tile.stages,
        shared_memory(x.device) // (tile.parts * (columns * tokens * 2 + tile.rows * nbytes)),
    )
    num_tiles = -(-num_rows // tile.rows)
    share = -(-in_features // (step * tile.splits)) * step
    splits = -(-in_features // share)  # fewer if there are few columns
    parts = counts = out
    if splits > 1:
        if num_tokens > tokens:
            raise ValueError(f"splits are for up to {tokens} rows")
        shape = (splits, num_tiles, tokens, tile.rows)
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        counts = counters(x.device, num_tiles)
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    pdl = supported(x.device)
    _grouped_kernel[(num_tiles, splits, -(-num_tokens // tokens))](
        x,
        values,
        scales,
        scales if offsets is None else offsets,
        scales if bias is None else bias,
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
        values.stride(1),
        values.stride(0),
        scales.shape[1],
        share,
        TOKENS=tokens,
        ROWS=tile.rows,
        COLUMNS=columns,
        GROUP=weight.group,
        PLANES=weight.planes,
        SHIFTED=offsets is not None,
        PARTS=tile.parts,
        SPLITS=splits,
        STAGES=max(1, stages),
        FETCHED=2 * tile.parts if pdl else 0,
        EVEN=in_features % step == 0,
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
        num_warps=max(4, tile.rows // 16) if tile.parts == 1 else tile.parts,
    )


def best_tile(weight: Grouped, num_tokens: int) -> Tile:
    """Return the fastest tile on an H200 for groups of 128, measured in chains of products."""
    num_rows, in_features = weight.shape
    is_wide, is_long = num_rows > 64 * MULTIPROCESSORS, in_features >= 8192
    if num_tokens <= FEW_TOKENS:
        return _few_tokens_tile(num_tokens, num_rows, is_wide, is_long)
    if num_tokens <= 32:
        return Tile(128, stages=3) if is_wide else Tile(64, stages=3, splits=4)
    programs = -(-num_rows // 64) * -(-num_tokens // TOKENS)
    if num_tokens <= TOKENS and programs <= MULTIPROCESSORS // 2:
        return Tile(64, stages=3, splits=4)
    return Tile(64, stages=4 if programs <= MULTIPROCESSORS else 3)


def _few_tokens_tile(num_tokens: int, num_rows: int, is_wide: bool, is_long: bool) -> Tile:
    if is_wide:
        return Tile(64, stages=3, parts=2 if num_tokens <= 8 else 1)
    if is_long:
        return Tile(64, stages=3, splits=8)
    if num_tokens <= 8 or num_rows <= 4096:
        return Tile(16, stages=4, parts=4)
    return Tile(32, stages=3, parts=4)


@triton.jit
def unpack_int4(words, DTYPE: tl.constexpr):
    """Return the four numbers of 4 bits of each word, lowest bits first, less 8, in 16 bits.

    A number in the last digits of 128 (bf16) or 1024 (fp16) adds itself to it."""
    if INTERPRETED:
        a = ((words & 15).to(tl.float32) - 8.0).to(DTYPE)
        b = (((words >> 4) & 15).to(tl.float32) - 8.0).to(DTYPE)
        c = (((words >> 8) & 15).to(tl.float32) - 8.0).to(DTYPE)
        d = ((words >> 12).to(tl.float32) - 8.0).to(DTYPE)
    elif DTYPE.is_bf16():
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 b, c, d, one, middle;
            mov.b32 one, 0x3F803F80;
            mov.b32 middle, 0xC308C308;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $2, c, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, d, 0x000F000F, 0x43004300, 0xEA;
            fma.rn.bf16x2 $0, $0, one, middle;
            fma.rn.bf16x2 $1, $1, one, middle;
            fma.rn.bf16x2 $2, $2, one, middle;
            fma.rn.bf16x2 $3, $3, one, middle;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 b, c, d, middle;
            mov.b32 middle, 0x64086408;
            shr.u32 b, $4, 4;
            shr.u32 c, $4, 8;
            shr.u32 d, $4, 12;
            lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $2, c, 0x000F000F, 0x64006400, 0xEA;
            lop3.b32 $3, d, 0x000F000F, 0x64006400, 0xEA;
            sub.f16x2 $0, $0, middle;
            sub.f16x2 $1, $1, middle;
            sub.f16x2 $2, $2, middle;
            sub.f16x2 $3, $3, middle;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def unpack_int8(words, DTYPE: tl.constexpr):
    """Return the two numbers of 8 bits of each word, lowest bits first, less 128, in 16 bits.

    Exact, in bf16 too. The compiler's conversion of integers has a quarter of the rate."""
    if INTERPRETED:
        a = ((words & 255).to(tl.float32) - 128.0).to(DTYPE)
        b = ((words >> 8).to(tl.float32) - 128.0).to(DTYPE)
    elif DTYPE.is_bf16():
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 base, i, j, k, l;
            .reg .f32 x, y, z, w;
            mov.b32 base, 0x4B000000;
            prmt.b32 i, $2, base, 0x7440;
            prmt.b32 j, $2, base, 0x7442;
            prmt.b32 k, $2, base, 0x7441;
            prmt.b32 l, $2, base, 0x7443;
            mov.b32 x, i;
            mov.b32 y, j;
            mov.b32 z, k;
            mov.b32 w, l;
            add.f32 x, x, 0fCB000080;
            add.f32 y, y, 0fCB000080;
            add.f32 z, z, 0fCB000080;
            add.f32 w, w, 0fCB000080;
            cvt.rn.bf16x2.f32 $0, y, x;
            cvt.rn.bf16x2.f32 $1, w, z;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        a, b = tl.inline_asm_elementwise(
            """{
            .reg .b32 b, middle;
            mov.b32 middle, 0x64806480;
            shr.u32 b, $2, 8;
            lop3.b32 $0, $2, 0x00FF00FF, 0x64006400, 0xEA;
            lop3.b32 $1, b, 0x00FF00FF, 0x64006400, 0xEA;
            sub.f16x2 $0, $0, middle;
            sub.f16x2 $1, $1, middle;
            }""",
            "=&r,=&r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return a, b


@triton.jit
def _load_groups(pointers, live, stride, GROUPS: tl.constexpr, EVEN: tl.constexpr):
    """Load the numbers of a step's groups, at most four. Absent ones are 0.0."""
    return (
        _load_group(pointers, live, EVEN),
        _load_group(pointers + stride, live, EVEN) if GROUPS > 1 else 0.0,
        _load_group(pointers + 2 * stride, live, EVEN) if GROUPS > 2 else 0.0,
        _load_group(pointers + 3 * stride, live, EVEN) if GROUPS > 2 else 0.0,
    )


@triton.jit
def _load_group(pointers, live, EVEN: tl.constexpr):
    if EVEN:
        numbers = tl.load(pointers)
    else:
        numbers = tl.load(pointers, mask=live, other=0.0)
    return numbers.to(tl.float32)


@triton.jit
def _fetch_groups(
    pointer,
    at_group,
    group_stride,
    share,
    left,
    size,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    GATED: tl.constexpr,
):
    """Prefetch the scales or offsets of a program: each step would wait for them."""
    OUTPUTS: tl.constexpr = ROWS // 2 if GATED else ROWS
    lane = tl.arange(0, 4) * (ROWS // 4)  # one for each 128 bytes or less
    row = tl.minimum(tl.program_id(0) * OUTPUTS + lane % OUTPUTS, size - 1)
    if GATED:
        row += lane // OUTPUTS * size
    pointers = pointer + at_group + row[:, None]
    last = tl.minimum(share, left) // GROUP - 1
    for first in range(0, last + 1, 32):
        group = tl.minimum(first + tl.arange(0, 32), last).to(tl.int64)
        fetch(pointers + (group * group_stride)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _grouped_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    offset_ptr,
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
    row_stride,
    step_stride,
    group_stride,
    share,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    SHIFTED: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    EVEN: tl.constexpr,
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
    """Multiply ROWS rows of the weight by x, over `share` of its columns.

    Tiles are `[rows or tokens, columns]`, with several parts `[parts, ..., columns]`."""
    if not LATE:
        release(PDL)
    WIDTH: tl.constexpr = COLUMNS // PLANES  # words of a step
    GROUPS: tl.constexpr = COLUMNS // GROUP  # of a step
    SHARED: tl.constexpr = PLANES // GROUPS  # planes with the same scale
    MIDDLE: tl.constexpr = 2.0 ** (16 // PLANES - 1)  # of integers
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    row, out_row = tile_rows(size, ROWS, GATED)
    begin = tl.program_id(1) * share
    left = in_features - begin
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    at_out, stored = tile_outputs(token, out_row, num_tokens, size)
    constants = load_constants(
        scale_ptr,
        bias_ptr,
        norm_ptr,
        row_part_ptr,
        row,
        out_row,
        size,
        False,
        BIASED,
        NORMED,
        PARTED,
    )
    weight_ptr += (begin // COLUMNS).to(tl.int64) * step_stride
    at_group = (begin // GROUP).to(tl.int64) * group_stride
    if PARTS == 1:
        part = tl.zeros([1, 1], tl.int32)
        word = tl.arange(0, WIDTH)[None, :]
        rows = row[:, None]
        tokens = token[:, None]
        ones = tl.full([ROWS, WIDTH], 1.0, tl.float32).to(DTYPE)
        zero = tl.zeros([ROWS, TOKENS], tl.float32)
    else:
        part = tl.arange(0, PARTS)[:, None, None]
        word = tl.arange(0, WIDTH)[None, None, :]
        rows = row[None, :, None]
        tokens = token[None, :, None]
        ones = tl.full([PARTS, ROWS, WIDTH], 1.0, tl.float32).to(DTYPE)
        zero = tl.zeros([PARTS, ROWS, TOKENS], tl.float32)
    acc = zero
    if FETCHED:
        last = (tl.minimum(share, left) // COLUMNS - 1).to(tl.int64)
        steps = tl.minimum(tl.arange(0, FETCHED), last)
        fetch(
            weight_ptr + (row.to(tl.int64) * row_stride)[:, None] + (steps * step_stride)[None, :]
        )
        _fetch_groups(scale_ptr, at_group, group_stride, share, left, size, ROWS, GROUP, GATED)
        if SHIFTED:
            _fetch_groups(offset_ptr, at_group, group_stride, share, left, size, ROWS, GROUP, GATED)
    values = weight_ptr + rows.to(tl.int64) * row_stride + word + part.to(tl.int64) * step_stride
    at_group += part * GROUPS * group_stride
    scales = scale_ptr + at_group + rows
    offsets = offset_ptr + at_group + rows
    x_rows = x_ptr + begin + tokens.to(tl.int64) * in_features + part * COLUMNS + word
    live = tokens < num_tokens
    end = tl.minimum(share, left)
    inside = part * COLUMNS < end
    scale = _load_groups(scales, inside, group_stride, GROUPS, EVEN)
    if SHIFTED:
        offset = _load_groups(offsets, inside, group_stride, GROUPS, EVEN)
    adapters = 0.0
    if RANK:
        index = load_places(place_ptr, token, num_tokens)
    wait(PDL and not RANK)
    if not RANK:
        inputs = load_inputs(
            given_ptr, residual_ptr, token, at_out, stored, adapters, num_tokens, UNSCALED, NORMED
        )
    for start in tl.range(0, end, PARTS * COLUMNS, num_stages=STAGES):
        inside = start + part * COLUMNS < end
        at = tl.cast(start // COLUMNS, tl.int64) * step_stride
        words = load_once(values + at, inside, EVEN)
        if PLANES == 4:
            planes = unpack_int4(words, DTYPE)
        else:
            planes = unpack_int8(words, DTYPE)
        # The scales of the next step come from the L2 cache while this one is multiplied.
        after = start + (PARTS + part) * COLUMNS < end
        scales += PARTS * GROUPS * group_stride
        next_scale = _load_groups(scales, after, group_stride, GROUPS, False)
        if SHIFTED:
            offsets += PARTS * GROUPS * group_stride
            next_offset = _load_groups(offsets, after, group_stride, GROUPS, False)
        sums = zero
        ones_sums = zero
        for plane in tl.static_range(PLANES):
            x = tl.load(
                x_rows + start + plane * WIDTH,
                mask=live if EVEN else live & inside,
                other=0.0,
            )
            if PARTS == 1:
                sums = dot(planes[plane], x, sums)
            else:  # tiles are small: sums that do not wait for each other are faster
                acc += scale[plane // SHARED] * dot(planes[plane], x, zero)
            if SHIFTED:
                ones_sums = dot(ones, x, ones_sums)
            if plane % SHARED == SHARED - 1:
                if PARTS == 1:
                    acc += scale[plane // SHARED] * sums
                    sums = zero
                if SHIFTED:
                    acc += (offset[plane // SHARED] + MIDDLE * scale[plane // SHARED]) * ones_sums
                    ones_sums = zero
        scale = next_scale
        if SHIFTED:
            offset = next_offset
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
        False,
        BIASED,
        UNSCALED,
        NORMED,
        RANK,
        KIND,
        GATED,
        True,
    )
