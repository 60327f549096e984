"""FP8 (e4m3): rounding to it, quantizing rows, and products of few rows with weights kept in it.

Products of few rows are bound by reading the weight, so there the weight alone is in FP8, with a scale for each of
its rows, and x stays in 16 bits; the structure is that of `linear`. For many rows, x too is quantized, row by row
(`quantize`), and the tensor cores multiply FP8 numbers.
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import apply, check_kind
from .linear import Tile, _load, _load_bias
from .pdl import fetch, release, supported, wait

FP8 = torch.float8_e4m3fn
MAX = tl.constexpr(448.0)
MIN_GREATEST = tl.constexpr(2.0**-100)
"""Rows of zeros have a scale too, and its inverse is finite."""
TOKENS = 16
"""Rows of x that a program takes. More are done in runs of so many, each of which reads the weight anew."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """(FP8 `[num_tokens, size]`, fp32 scales `[num_tokens, 1]`) of x: row ~ FP8 * scale, each row's greatest at 448.

    x: `[num_tokens, size]`, contiguous; each row is read once. Raises ValueError when x is not contiguous.
    """
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    num_tokens, size = x.shape
    out = torch.empty(x.shape, dtype=FP8, device=x.device)
    scale = torch.empty((num_tokens, 1), dtype=torch.float32, device=x.device)
    size_pad = _power_of_two(size)
    pdl = supported(x.device)
    _quantize_kernel[(num_tokens,)](
        x,
        out,
        scale,
        size,
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
    tile: Tile | None = None,
) -> Tensor:
    """act(x (W * scale)ᵀ + b) `[num_tokens, size]`, or act(gate) * up where W holds the rows of gate, then up's.

    x: `[num_tokens, in]`, not FP8; weight: FP8 `[size, in]`, gated: `[2 * size, in]`; scale (fp32) and bias: as
    many as the weight's rows. All contiguous. Sums are in fp32, in an order that depends on the shapes alone.

    NOTE: on Hopper the kernel reads `weight` before the kernel ahead of it has ended, as `linear.linear` does.

    Raises ValueError for an unknown activation, a weight that is not FP8, or tensors that are not contiguous.
    """
    num_tokens, in_features = x.shape
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if activation is not None:
        check_kind(activation)
    if weight.dtype != FP8:
        raise ValueError(f"the weight must be {FP8}, not {weight.dtype}")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and the weight must be contiguous")
    if out is None:
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    tile = tile or _tile(num_tokens, size, in_features, gated)
    pdl = supported(x.device)
    tensors = (x, weight, scale, weight if bias is None else bias, out)
    options = {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "EVEN": in_features % (tile.columns * tile.parts) == 0,
        "BIASED": bias is not None,
        "KIND": activation or "",
        "GATED": gated,
        "PDL": pdl,
        "launch_pdl": pdl,
        "num_warps": tile.warps,
    }
    programs = -(-size // tile.rows)
    if _in_registers(num_tokens, in_features):
        _vector_kernel[(programs,)](*tensors, size, in_features, **options)
    else:
        options |= {"PARTS": tile.parts, "STAGES": tile.stages, "FETCHED": tile.fetched if pdl else 0}
        grid = (programs, -(-num_tokens // TOKENS))
        _dot_kernel[grid](*tensors, num_tokens, size, in_features, TOKENS=TOKENS, **options)
    return out


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _in_registers(num_tokens: int, in_features: int) -> bool:
    """Whether `_vector_kernel` serves: it reads rows of the weight by aligned words."""
    return num_tokens == 1 and in_features % 16 == 0


def _tile(num_tokens: int, size: int, in_features: int, gated: bool) -> Tile:
    """From the shapes measured for `linear` on an H200: as many bytes of the weight on their way, and no more of x
    for each of them. Not measured themselves.
    """
    if _in_registers(num_tokens, in_features):
        return Tile(8, 1024, 1, 2, 1, 0) if in_features <= 1024 else Tile(4, 2048, 1, 4, 1, 0)
    if gated:
        return Tile(16, 128, 1, 1, 4, 0)
    if min(size, in_features) < 1024:
        return Tile(8, 128, 4, 4, 4, 1024)
    return Tile(16 if num_tokens <= 8 else 32, 128, 4, 4, 4, 1024)


@triton.jit
def to_fp8(x):
    """fp32 to the nearest e4m3, ties to even, what is beyond its range to the greatest; NaN stays NaN."""
    x = tl.clamp(x, -MAX, MAX, propagate_nan=tl.PropagateNan.ALL)
    if INTERPRETED:
        # The interpreter cuts and forgets carries, but numbers of few enough digits pass unchanged. Adding 1.5 * 2^20
        # times a number's power of two, and taking it away, leaves 3 digits behind the leading one.
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 127 - 6)
        magic = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + magic) - magic
    return x.to(tl.float8e4nv)


@triton.jit
def _quantize_kernel(x_ptr, out_ptr, scale_ptr, size, SIZE_PAD: tl.constexpr, PDL: tl.constexpr):
    """One row, held in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PAD)
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + row * size + column, mask=column < size, other=0.0).to(tl.float32)
    greatest = tl.maximum(tl.max(tl.abs(x), 0), MIN_GREATEST)
    tl.store(out_ptr + row * size + column, to_fp8(x * tl.div_rn(MAX, greatest)), mask=column < size)
    tl.store(scale_ptr + row, tl.div_rn(greatest, MAX))


@triton.jit
def _unpacked(words):
    """The four e4m3 numbers of each int32, the lowest bits' first, in fp32.

    Left to itself the compiler takes bytes apart and puts them together again, at two instructions for each.
    """
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
    """The products of a tile of the weight, four numbers in each of `[rows, columns / 4]`, with x `[1, columns]`."""
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [1, COLUMNS // 4, 2, 2]))
    x_a, x_c = tl.split(even)
    x_b, x_d = tl.split(odd)
    a, b, c, d = _unpacked(words)
    return a * x_a + b * x_b + c * x_c + d * x_d


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    size,
    in_features,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of the one token. Each tile of the weight is asked for while the one before is summed.

    Rows past the last one are the last one again.
    """
    WORDS: tl.constexpr = COLUMNS // 4
    release(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    num_words = in_features // 4
    # Threads load as many numbers of the weight as of x, 8, so that what they multiply is theirs already.
    word = tl.max_contiguous(tl.arange(0, WORDS)[None, :], [1, 2])
    rows = weight_ptr.to(tl.pointer_type(tl.int32)) + (row.to(tl.int64) * num_words)[:, None]
    weight = _load(rows + word, word < num_words, not EVEN)
    acc = tl.zeros([ROWS, WORDS], tl.float32)
    if GATED:
        up_rows = rows + tl.cast(size, tl.int64) * num_words
        up = _load(up_rows + word, word < num_words, not EVEN)
        up_acc = tl.zeros([ROWS, WORDS], tl.float32)
        up_scale = tl.load(scale_ptr + size + row)
        up_bias = _load_bias(bias_ptr + size + row, BIASED, ROWS)
    scale = tl.load(scale_ptr + row)
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    wait(PDL)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    column = tl.arange(0, COLUMNS)[None, :]
    for start in range(0, last, COLUMNS):
        x = tl.load(x_ptr + start + column)
        after = (start + COLUMNS) // 4 + word
        weight_after = _load(rows + after, after < num_words, not EVEN)
        acc += _sums_by_four(weight, x, COLUMNS)
        weight = weight_after
        if GATED:
            up_after = _load(up_rows + after, after < num_words, not EVEN)
            up_acc += _sums_by_four(up, x, COLUMNS)
            up = up_after
    column += last
    if EVEN:
        x = tl.load(x_ptr + column)
    else:
        x = tl.load(x_ptr + column, mask=column < in_features, other=0.0)
    y = tl.sum(acc + _sums_by_four(weight, x, COLUMNS), 1) * scale + bias
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= tl.sum(up_acc + _sums_by_four(up, x, COLUMNS), 1) * up_scale + up_bias
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))


@triton.jit
def _fetch(rows, in_features, COLUMNS: tl.constexpr):
    """Ask for the first columns of rows, one element of every 128 bytes, into the L2 cache."""
    column = tl.minimum(tl.arange(0, COLUMNS // 128) * 128, in_features - 1)
    fetch(rows[:, None] + column[None, :])


@triton.jit
def _like(weight, DTYPE: tl.constexpr):
    """e4m3 in the type of x. The way from fp16 to bf16 that the compiler takes has a quarter of this one's rate."""
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
def _dot(x, weight, acc, PARTS: tl.constexpr):
    """x @ weightᵀ + acc in fp32, of x's type. The interpreter multiplies bf16 numbers' bits, so it gets them widened."""
    if INTERPRETED:
        x = x.to(tl.float32)
    weight = _like(weight, x.dtype)
    if PARTS == 1:
        weight = tl.trans(weight)
    else:
        weight = tl.trans(weight, 0, 2, 1)
    return tl.dot(x, weight, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    size,
    in_features,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
    FETCHED: tl.constexpr,
    EVEN: tl.constexpr,
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs of TOKENS tokens. Tiles are `[tokens or rows, columns]`, of several parts `[parts, ...,
    columns]`.

    Rows past the last one are the last one again.
    """
    STEP: tl.constexpr = PARTS * COLUMNS
    release(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    token = tl.program_id(1).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    rows = weight_ptr + row.to(tl.int64) * in_features
    up_offset = tl.cast(size, tl.int64) * in_features
    if FETCHED:
        _fetch(rows, in_features, FETCHED)
        if GATED:
            _fetch(rows + up_offset, in_features, FETCHED)
    if PARTS == 1:
        column = tl.arange(0, COLUMNS)[None, :]
        weight_rows = rows[:, None]
        x_rows = x_ptr + (token * in_features)[:, None]
        in_x = (token < num_tokens)[:, None]
        acc = tl.zeros([TOKENS, ROWS], tl.float32)
    else:
        part = tl.arange(0, PARTS)[:, None, None]
        column = part * COLUMNS + tl.arange(0, COLUMNS)[None, None, :]
        weight_rows = rows[None, :, None]
        x_rows = x_ptr + (token * in_features)[None, :, None]
        in_x = (token < num_tokens)[None, :, None]
        acc = tl.zeros([PARTS, TOKENS, ROWS], tl.float32)
    up_acc = acc
    scale = tl.load(scale_ptr + row)
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    if GATED:
        up_scale = tl.load(scale_ptr + size + row)
        up_bias = _load_bias(bias_ptr + size + row, BIASED, ROWS)
    wait(PDL)
    for start in tl.range(0, in_features, STEP, num_stages=STAGES):
        at = start + column
        if EVEN:
            x = tl.load(x_rows + at, mask=in_x, other=0.0)
        else:
            x = tl.load(x_rows + at, mask=in_x & (at < in_features), other=0.0)
        acc = _dot(x, _load(weight_rows + at, at < in_features, not EVEN), acc, PARTS)
        if GATED:
            up = _load(weight_rows + up_offset + at, at < in_features, not EVEN)
            up_acc = _dot(x, up, up_acc, PARTS)
    if PARTS > 1:
        acc = tl.sum(acc, 0)
        up_acc = tl.sum(up_acc, 0)
    y = acc * scale[None, :] + bias[None, :]
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= up_acc * up_scale[None, :] + up_bias[None, :]
    out = out_ptr + (token * size)[:, None] + row[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None])
