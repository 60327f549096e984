"""Normalization of rows, fused with the residual sum before it: one program per row."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pdl import release, supported, wait

MAX_SIZE = 32768  # longest row: it must fit into the registers of one program


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (RMS norm of x + residual, x + residual); Zhang & Sennrich, 2019.

    x, residual: `[num_tokens, size]`, contiguous; weight: `[size]`. The sum is rounded and written
    into `residual`. The norm is of the rounded sum, in fp32. Without a residual the sum is x
    itself.

    Raises ValueError for rows longer than MAX_SIZE."""
    return _add_norm(x, residual, weight, None, eps, out)


def add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (layer norm of x + residual, x + residual); Ba et al., 2016. See `add_rms_norm`."""
    return _add_norm(x, residual, weight, bias, eps, out)


def _add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_tokens, size = x.shape
    if size > MAX_SIZE:
        raise ValueError(f"rows of {size} are longer than {MAX_SIZE}")
    if not x.is_contiguous() or (residual is not None and not residual.is_contiguous()):
        raise ValueError("x and residual must be contiguous")
    out = torch.empty_like(x) if out is None else out
    block = 1 << (size - 1).bit_length()
    pdl = supported(x.device)
    _add_norm_kernel[(num_tokens,)](
        x,
        x if residual is None else residual,
        weight,
        weight if bias is None else bias,
        out,
        eps,
        SIZE=size,
        BLOCK=block,
        ADDED=residual is not None,
        CENTERED=bias is not None,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=max(1, min(16, block // 256)),
    )
    return out, x if residual is None else residual


@triton.jit
def _add_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    CENTERED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Norm one row."""
    column = tl.arange(0, BLOCK)
    live = column < SIZE
    weight = tl.load(weight_ptr + column, mask=live, other=0.0).to(tl.float32)
    if CENTERED:
        bias = tl.load(bias_ptr + column, mask=live, other=0.0).to(tl.float32)
    row = tl.program_id(0).to(tl.int64) * SIZE + column
    wait(PDL)
    release(PDL)
    x = tl.load(x_ptr + row, mask=live, other=0.0)
    if ADDED:
        residual = tl.load(residual_ptr + row, mask=live, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row, x, mask=live)
    x = x.to(tl.float32)
    if CENTERED:
        x = tl.where(live, x - tl.sum(x, 0) / SIZE, 0.0)
    y = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if CENTERED:
        y += bias
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty), mask=live)
