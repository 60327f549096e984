"""FP8 (e4m3): rounding, quantization of rows, and products of few rows with FP8 weights.

Products of few rows are bound by reading the weight, so only the weight is in FP8, with a scale per
row or block, and x stays in 16 bits. One row of x is multiplied in registers, as in `linear`; for
more see `matmul`. For many rows, x is quantized too (`quantize`), and the tensor cores multiply FP8
numbers: by `fp8_matmul` if the weight has blocks."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import FP8_BLOCK

from ..activation import apply, check_kind
from ..pdl import release, supported, wait
from ..sizes import power_of_two
from .epilogue import (
    Delta,
    load_parts,
    load_row_up,
    load_slot,
    row_arguments,
    row_constants,
    row_delta,
)
from .linear import _load_bias
from .matmul import BLOCK, MAX_TOKENS, fetch_block_scales, load_block_scales, load_once, matmul

FP8 = torch.float8_e4m3fn
MAX = tl.constexpr(448.0)
MIN_GREATEST = tl.constexpr(2.0**-100)
"""Least maximum of a row, so that the scale of zeros has a finite inverse."""
MAX_SIZE = 32768  # longest row whose activation is computed in registers
TOKENS = 16  # rows of x up to which the product is bound by reading the weight
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def quantize(
    x: Tensor, activation: str | None = None, gated: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (FP8 `[num_tokens, size]`, fp32 scales `[num_tokens, 1]`) of x or act(x).

    A row is about FP8 * scale; its maximum becomes 448. x: `[num_tokens, size]`; gated: rows gate |
    up `[num_tokens, 2 * size]`, of which act(gate) * up is quantized. An activation is rounded to
    x's type first. Raises ValueError if x is not contiguous, and for an unknown activation."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    if activation is not None:
        check_kind(activation)
    num_tokens, size = x.shape
    if gated:
        size //= 2
    out = torch.empty((num_tokens, size), dtype=FP8, device=x.device)
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    size_pad = power_of_two(size)
    pdl = supported(x.device)
    _quantize_kernel[(num_tokens,)](
        x,
        out,
        scale,
        size,
        KIND=activation or "",
        GATED=gated,
        SIZE_PAD=size_pad,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, size_pad // 512)),
    )
    return out, scale


def linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    delta: Delta | None = None,
) -> Tensor:
    """Return act(x (W * scale)ᵀ + b), or act(gate) * up if W holds gate's rows, then up's.

    x: `[num_tokens, in]`, not FP8; weight: FP8 `[size, in]`, gated: `[2 * size, in]`; scale: fp32,
    one per row of the weight, or `[blocks of rows, blocks of columns]`, of FP8_BLOCK each; bias:
    one per row of the weight. All contiguous. Sums are in fp32, in an order that depends on the
    shapes alone. More than MAX_TOKENS rows are done in runs. `delta` is added before bias,
    activation and gate. Returns `[num_tokens, size]`.

    NOTE: on Hopper the kernel reads `weight` before the kernel ahead of it ends, like
    `linear.linear`.

    Raises ValueError for an unknown activation, a weight that is not FP8, other scales, tensors
    that are not contiguous, or if `up` begins inside a block."""
    num_tokens = len(x)
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if activation is not None:
        check_kind(activation)
    if weight.dtype != FP8:
        raise ValueError(f"the weight must be {FP8}, not {weight.dtype}")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and the weight must be contiguous")
    check_scales(scale, weight, gated)
    if out is None:
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if uses_vector(num_tokens, weight):
        _vector(x, weight, scale, bias, activation, gated, out, delta)
    else:
        for begin in range(0, num_tokens, MAX_TOKENS):
            rows = slice(begin, begin + MAX_TOKENS)
            part = None if delta is None else delta.take(rows)
            matmul(x[rows], weight, scale, bias, activation, gated, out[rows], delta=part)
    return out


def check_scales(scale: Tensor, weight: Tensor, gated: bool) -> None:
    """Raise ValueError if these are not the scales of rows or blocks that a kernel supports."""
    rows, columns = weight.shape
    blocks = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    if scale.shape not in ((rows,), blocks) or not scale.is_contiguous():
        raise ValueError(f"the scales must be [{rows}] or {list(blocks)}, contiguous")
    if scale.dim() == 2 and gated and rows // 2 % FP8_BLOCK:
        raise ValueError(f"gate's {rows // 2} rows are no multiple of {FP8_BLOCK}")


def uses_vector(num_tokens: int, weight: Tensor) -> bool:
    """Return True for one row, if the kernel that reads aligned words of the weight can."""
    return num_tokens == 1 and weight.shape[1] % 16 == 0


def _vector(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor,
    delta: Delta | None,
) -> None:
    """Compute `linear` for one token, with tiles of as many bytes as those of `linear.linear`."""
    in_features, size = x.shape[1], out.shape[1]
    rows, columns, warps = (8, 1024, 2) if in_features <= 1024 else (4, 2048, 4)
    pdl = supported(x.device)
    _vector_kernel[(-(-size // rows),)](
        x,
        weight,
        scale,
        weight if bias is None else bias,
        out,
        *row_arguments(delta, out),
        size,
        in_features,
        ROWS=rows,
        COLUMNS=columns,
        EVEN=in_features % columns == 0,
        BLOCKED=scale.dim() == 2,
        BIASED=bias is not None,
        KIND=activation or "",
        GATED=gated,
        **row_constants(delta),
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=warps,
    )


@triton.jit
def to_fp8(x):
    """Round fp32 to the nearest e4m3, ties to even, and clamp. NaN stays NaN."""
    if INTERPRETED:  # it truncates, but numbers with few digits pass unchanged
        x = round_to_fp8(tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL))
    return x.to(tl.float8e4nv)


@triton.jit
def round_to_fp8(x):
    """Return fp32 rounded to the nearest e4m3, ties to even, in fp32. x: at most 448.

    Adding 1.5 * 2^20 times a number's power of two, and subtracting it, leaves 3 digits after the
    leading one."""
    exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 127 - 6)
    magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
    return (x + magic) - magic


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """Return fp32 rounded to a type of 16 bits, in fp32.

    The compiler would round one number at a time, at a quarter of the rate of pairs."""
    if DTYPE.is_bf16() and not INTERPRETED:
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            "=r,r,r",
            [x],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=2,
        )
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def store_quantized(x, column, live, size, out_ptr, scale_ptr):
    """Quantize a program's row. x: its columns in fp32, 0 where not `live`."""
    row = tl.program_id(0).to(tl.int64)
    greatest = tl.maximum(tl.max(tl.abs(x), 0), MIN_GREATEST)
    tl.store(out_ptr + row * size + column, to_fp8(x * tl.div_rn(MAX, greatest)), mask=live)
    tl.store(scale_ptr + row, tl.div_rn(greatest, MAX))


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    size,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    SIZE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Quantize one row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    live = column < size
    own = x_ptr + row * (2 * size if GATED else size) + column
    wait(PDL)
    release(PDL)
    x = tl.load(own, mask=live, other=0.0).to(tl.float32)
    if KIND != "":
        x = apply(x, KIND)
        if GATED:
            x *= tl.load(own + size, mask=live, other=0.0).to(tl.float32)
        x = rounded(x, x_ptr.dtype.element_ty)
    store_quantized(x, column, live, size, out_ptr, scale_ptr)


@triton.jit
def unpacked(words):
    """Return the four e4m3 numbers of each int32, lowest bits first, in fp32.

    The compiler's own code splits and rejoins bytes, with two more instructions for each."""
    if INTERPRETED:
        a = (words & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        b = ((words >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        c = ((words >> 16) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
        d = ((words >> 24) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b, c, d;
            .reg .b32 ab, cd;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 ab, low;
            cvt.rn.f16x2.e4m3x2 cd, high;
            mov.b32 {a, b}, ab;
            mov.b32 {c, d}, cd;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.f32.f16 $2, c;
            cvt.f32.f16 $3, d;
            }""",
            "=f,=f,=f,=f,r",
            [words],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    return a, b, c, d


@triton.jit
def _sums_by_four(words, x, COLUMNS: tl.constexpr):
    """Multiply a tile of the weight, words `[rows, columns / 4]`, by x `[1, columns]`.

    Each sum is over the four numbers of a word."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [1, COLUMNS // 4, 2, 2]))
    x_a, x_c = tl.split(even)
    x_b, x_d = tl.split(odd)
    a, b, c, d = unpacked(words)
    return a * x_a + b * x_b + c * x_c + d * x_d


@triton.jit
def _load_row_scale(pointers, BLOCKED: tl.constexpr, ROWS: tl.constexpr):
    if BLOCKED:
        scale = tl.full([ROWS], 1.0, tl.float32)
    else:
        scale = tl.load(pointers)
    return scale


@triton.jit
def _times_blocks(sums, scale_ptr, first_row, start, in_features, BLOCKED: tl.constexpr):
    """Multiply sums of words by the scales of their blocks of columns, if BLOCKED.

    start: the first column. The rows are in the block of the first one. Each thread loads the scale
    of its pairs of adjacent words."""
    if BLOCKED:
        pair = tl.arange(0, sums.shape[1] // 2)[None, :]
        block = start // BLOCK + pair // (BLOCK // 8)
        scales = scale_ptr + first_row // BLOCK * tl.cdiv(in_features, BLOCK)
        scale = load_block_scales(scales, block, in_features)
        sums *= tl.reshape(tl.join(scale, scale), [1, sums.shape[1]])
    return sums


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    low_ptr,
    up_ptr,
    block_ptr,
    row_part_ptr,
    place_ptr,
    used_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCKED: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    RANK: tl.constexpr,
    PARTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of the one token. Each tile is loaded while the one before is summed.

    Rows past the last one repeat it."""
    WORDS: tl.constexpr = COLUMNS // 4
    release(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    num_words = in_features // 4
    # Threads load 8 numbers of the weight and of x each, so that none move between threads.
    word = tl.max_contiguous(tl.arange(0, WORDS)[None, :], [1, 2])
    rows = weight_ptr.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * num_words)[:, None]
    weight = load_once(rows + word, word < num_words, EVEN)
    acc = tl.zeros([ROWS, WORDS], tl.float32)
    if GATED:
        up_rows = rows + tl.cast(size, tl.int64) * num_words
        up = load_once(up_rows + word, word < num_words, EVEN)
        up_acc = tl.zeros([ROWS, WORDS], tl.float32)
        up_scale = _load_row_scale(scale_ptr + size + row, BLOCKED, ROWS)
        up_bias = _load_bias(bias_ptr + size + row, BIASED, ROWS)
    scale = _load_row_scale(scale_ptr + row, BLOCKED, ROWS)
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    num_rows = 2 * size if GATED else size
    first_row = tl.program_id(0) * ROWS
    if BLOCKED and PDL:
        fetch_block_scales(scale_ptr, row, in_features)
        if GATED:
            fetch_block_scales(scale_ptr, size + row, in_features)
    if RANK:
        place = tl.load(place_ptr)
        part = load_parts(row_part_ptr + row, PARTED, ROWS)
        if GATED:
            up_part = load_parts(row_part_ptr + size + row, PARTED, ROWS)
    wait(PDL and not RANK)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, last, COLUMNS):
        x = tl.load(x_ptr + start + column)
        after = (start + COLUMNS) // 4 + word
        weight_after = load_once(rows + after, after < num_words, EVEN)
        sums = _sums_by_four(weight, x, COLUMNS)
        acc += _times_blocks(sums, scale_ptr, first_row, start, in_features, BLOCKED)
        weight = weight_after
        if GATED:
            up_after = load_once(up_rows + after, after < num_words, EVEN)
            sums = _sums_by_four(up, x, COLUMNS)
            up_acc += _times_blocks(sums, scale_ptr, size + first_row, start, in_features, BLOCKED)
            up = up_after
    if RANK:
        slot, blocks = load_slot(block_ptr, used_ptr, place)
        factor = load_row_up(up_ptr, slot, row, num_rows, RANK)
        if GATED:
            up_factor = load_row_up(up_ptr, slot, size + row, num_rows, RANK)
    column += last
    if EVEN:
        x = tl.load(x_ptr + column)
    else:
        x = tl.load(x_ptr + column, mask=column < in_features, other=0.0)
    sums = _sums_by_four(weight, x, COLUMNS)
    sums = _times_blocks(sums, scale_ptr, first_row, last, in_features, BLOCKED)
    y = tl.sum(acc + sums, 1) * scale + bias
    wait(PDL and RANK)
    if RANK:
        y += row_delta(low_ptr, up_ptr, factor, slot, blocks, part, row, num_rows, RANK)
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        sums = _sums_by_four(up, x, COLUMNS)
        sums = _times_blocks(sums, scale_ptr, size + first_row, last, in_features, BLOCKED)
        up_y = tl.sum(up_acc + sums, 1) * up_scale + up_bias
        if RANK:
            up_y += row_delta(
                low_ptr, up_ptr, up_factor, slot, blocks, up_part, size + row, num_rows, RANK
            )
        y *= up_y
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))
