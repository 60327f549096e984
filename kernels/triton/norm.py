"""Norms of rows, fused with the residual sum before them: one program per row."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.reference import Norm

from .pdl import release, supported, wait
from .products.fp8 import FP8, rounded, store_quantized

MAX_SIZE = 32768  # longest row: it must fit into the registers of one program
_ABSENT = (None, None, 0.0, False)  # in place of a norm. Triton compiles nothing for None


def join(
    x: Tensor,
    residual: Tensor | None,
    norms: Sequence[Norm],
    *,
    other: Tensor | None = None,
    post: Norm | None = None,
    scale: float = 1.0,
    factor: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> tuple[list[Tensor], Tensor]:
    """Return (norms of the sum, the sum): factor * (residual + scale * post(x + other)).

    x, residual, other: `[num_tokens, size]`, contiguous. norms: at most two. factor: `[1]`. The sum
    is rounded and written into `residual`. The norms are of the rounded sum, in fp32. Without a
    residual the sum is x itself, and there must be no other, post, scale or factor. row_scales:
    buffer for those of the only norm, `[num_tokens, 1]` in fp32. The norm is then rounded to x's
    type and that to FP8, as by `fp8.quantize`.

    Raises ValueError for rows longer than MAX_SIZE, for tensors that are not contiguous, for a
    product that nothing is added to, and for row_scales of another number of norms."""
    num_tokens, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} are longer than {MAX_SIZE}")
    if not all(rows.is_contiguous() for rows in (x, residual, other) if rows is not None):
        raise ValueError("x, residual and other must be contiguous")
    given = other is not None or post is not None or factor is not None
    if residual is None and (given or scale != 1.0):
        raise ValueError("other, post, scale and factor need a residual")
    if row_scales is not None and len(norms) != 1:
        raise ValueError(f"row_scales are of one norm, not {len(norms)}")
    outs = [torch.empty_like(x, dtype=None if row_scales is None else FP8) for _ in norms]
    total = x if residual is None else residual
    if not norms and residual is None:
        return outs, total
    first, second = (*norms, _ABSENT, _ABSENT)[:2]
    block = 1 << (size - 1).bit_length()
    pdl = supported(x.device)
    _join_kernel[(num_tokens,)](
        x,
        other,
        residual,
        scale,
        factor,
        *(post or _ABSENT),
        *first,
        *second,
        *(*outs, None, None)[:2],
        row_scales,
        SIZE=size,
        BLOCK=block,
        SCALED=scale != 1.0,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 256)),
    )
    return outs, total


def rms_norm_rows(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply an RMS norm in place.

    x: `[num_tokens, size]`, whose rows may be apart, as a slice of wider ones; weight: `[size]`, in
    x's type or fp32. Raises ValueError for rows longer than MAX_SIZE or not contiguous."""
    num_tokens, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} are longer than {MAX_SIZE}")
    if x.stride(1) != 1:
        raise ValueError("each row must be contiguous")
    block = 1 << (size - 1).bit_length()
    pdl = supported(x.device)
    _rms_norm_rows_kernel[(num_tokens,)](
        x,
        x.stride(0),
        weight,
        eps,
        SIZE=size,
        BLOCK=block,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 256)),
    )


@triton.jit
def load_parameter(pointer, column, live):
    """Return a norm's weight or bias in fp32, or None if there is none."""
    if pointer is None:
        values = None
    else:
        values = tl.load(pointer + column, mask=live, other=0.0).to(tl.float32)
    return values


@triton.jit
def normalize(x, live, weight, bias, eps, SIZE: tl.constexpr, CENTERED: tl.constexpr):
    """Return the norm of one row in fp32. x: 0 where not `live`."""
    if CENTERED:
        x = tl.where(live, x - tl.sum(x, 0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if bias is not None:
        y += bias
    return y


@triton.jit
def _join_kernel(
    x_ptr,
    other_ptr,
    residual_ptr,
    scale,
    factor_ptr,
    post_weight_ptr,
    post_bias_ptr,
    post_eps,
    POST_CENTERED: tl.constexpr,
    weight_ptr,
    bias_ptr,
    eps,
    CENTERED: tl.constexpr,
    weight_2_ptr,
    bias_2_ptr,
    eps_2,
    CENTERED_2: tl.constexpr,
    out_ptr,
    out_2_ptr,
    row_scale_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join and norm one row."""
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    post_weight = load_parameter(post_weight_ptr, column, live)
    post_bias = load_parameter(post_bias_ptr, column, live)
    weight = load_parameter(weight_ptr, column, live)
    bias = load_parameter(bias_ptr, column, live)
    weight_2 = load_parameter(weight_2_ptr, column, live)
    bias_2 = load_parameter(bias_2_ptr, column, live)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * SIZE + column
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + row, mask=live, other=0.0)
    if residual_ptr is not None:
        product = x.to(tl.float32)
        if other_ptr is not None:
            product += tl.load(other_ptr + row, mask=live, other=0.0).to(tl.float32)
        if post_weight_ptr is not None:
            product = normalize(
                product, live, post_weight, post_bias, post_eps, SIZE, POST_CENTERED
            )
        if SCALED:
            product *= scale
        residual = tl.load(residual_ptr + row, mask=live, other=0.0)
        total = product + residual.to(tl.float32)
        if factor_ptr is not None:
            total *= factor
        x = total.to(residual.dtype)
        tl.store(residual_ptr + row, x, mask=live)
    x = x.to(tl.float32)
    if weight_ptr is not None:
        y = normalize(x, live, weight, bias, eps, SIZE, CENTERED)
        if row_scale_ptr is None:
            tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=live)
        else:
            y = rounded(tl.where(live, y, 0.0), x_ptr.dtype.element_ty)
            # Threads have the same columns as without FP8, so that sums are in the same order.
            column = tl.max_contiguous(column, 8)
            store_quantized(y, column, live, SIZE, out_ptr, row_scale_ptr)
    if weight_2_ptr is not None:
        y_2 = normalize(x, live, weight_2, bias_2, eps_2, SIZE, CENTERED_2)
        tl.store(out_2_ptr + row, y_2.to(out_2_ptr.dtype.element_ty), mask=live)


@triton.jit
def _rms_norm_rows_kernel(
    x_ptr,
    stride,
    weight_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one row."""
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    weight = load_parameter(weight_ptr, column, live)
    row = x_ptr + tl.program_id(0).to(tl.int64) * stride + column
    wait(PDL)
    release(PDL)
    x = tl.load(row, mask=live, other=0.0).to(tl.float32)
    y = normalize(x, live, weight, None, eps, SIZE, False)
    tl.store(row, y.to(x_ptr.dtype.element_ty), mask=live)
