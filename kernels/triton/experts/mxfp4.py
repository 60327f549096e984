"""Products with weights in MXFP4 (`toolkit.kernels.mxfp4`)."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl

from ..products.epilogue import dot, side_by_side
from ..products.fp8 import INTERPRETED
from ..products.matmul import load_once

GROUP = tl.constexpr(32)
STEP = tl.constexpr(128)


@triton.jit
def _number(bits, exponents, GROUP_OF_STEP: tl.constexpr):
    """Return a group's numbers, for the interpreter. bits: int32, those of bf16."""
    exponent = (exponents >> (8 * GROUP_OF_STEP)) & 255
    factor = ((exponent + 126) << 23).to(tl.float32, bitcast=True)
    return ((bits << 16).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def _factors(words, exponents, GROUP_OF_STEP: tl.constexpr):
    """Return the bits of 2 ** (s - 1) in bf16 for a group's scales, for each word."""
    exponent = (exponents >> (8 * GROUP_OF_STEP)) & 255
    return tl.broadcast_to(((exponent + 126) << 7).to(tl.int16), words.shape)


@triton.jit
def numbers(words, exponents):
    """Return the numbers of the four groups of a step, in bf16: exactly.

    words: `[rows, 32]`; exponents: the four bytes of the scales, `[rows, 1]`. The three bits of a
    number are the end of the exponent and the first digit of bf16, 2 ** 126 times too small."""
    if INTERPRETED:
        wide = words.to(tl.int32)
        last = ((wide >> 6) & 0x180) | ((wide >> 5) & 0x40) | ((wide << 5) & 0x8000)
        a = _number(wide & 0x81C0, exponents, 0)
        b = _number((wide << 3) & 0x81C0, exponents, 1)
        c = _number((wide << 6) & 0x81C0, exponents, 2)
        d = _number(last, exponents, 3)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            """{
            .reg .b32 a, b, c, d, digit, sign;
            and.b32 a, $4, 0x81C081C0;
            shl.b32 b, $4, 3;
            and.b32 b, b, 0x81C081C0;
            shl.b32 c, $4, 6;
            and.b32 c, c, 0x81C081C0;
            shr.u32 d, $4, 6;
            shr.u32 digit, $4, 5;
            shl.b32 sign, $4, 5;
            and.b32 d, d, 0x01800180;
            lop3.b32 d, digit, 0x00400040, d, 0xEA;
            lop3.b32 d, sign, 0x80008000, d, 0xEA;
            mul.rn.bf16x2 $0, a, $5;
            mul.rn.bf16x2 $1, b, $6;
            mul.rn.bf16x2 $2, c, $7;
            mul.rn.bf16x2 $3, d, $8;
            }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [
                words,
                _factors(words, exponents, 0),
                _factors(words, exponents, 1),
                _factors(words, exponents, 2),
                _factors(words, exponents, 3),
            ],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def product(
    rows,
    scales,
    num_rows,
    x_rows,
    live,
    in_features,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Multiply rows of x by rows of a weight: fp32 `[tokens, rows]`.

    rows, scales: pointers to each row's words and scales of the first step; num_rows: of a step;
    x_rows, live: pointers to rows of x, and whether they exist."""
    word = tl.arange(0, GROUP)[None, :]
    column = tl.arange(0, STEP)[None, :]
    acc = tl.zeros([rows.shape[0], live.shape[0]], tl.float32)
    for start in tl.range(0, in_features, STEP, num_stages=STAGES):
        step = tl.cast(start // STEP, tl.int64) * num_rows
        words = load_once(rows[:, None] + step * GROUP + word, True, True)
        exponents = tl.load(scales + step)
        a, b, c, d = numbers(words, exponents[:, None])
        weight = side_by_side(side_by_side(a, b), side_by_side(c, d)).to(x_rows.dtype.element_ty)
        at = start + column
        in_x = live[:, None] if EVEN else live[:, None] & (at < in_features)
        x = tl.load(x_rows[:, None] + at, mask=in_x, other=0.0)
        acc = dot(weight, x, acc)
    return tl.trans(acc)
