"""Products of few rows with a weight: every decode step is mostly these, and they are bound by reading the
weight.

One row of x is multiplied in registers (`_vector_kernel`); for more, up to 64, see `matmul`. The first columns of the
weight are asked for before the kernel that computes x has ended. Results do not depend on which program comes first, but
for those of `add_norm` in one of some 2**29 rows.
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import matmul
from .activation import apply, check_kind
from .matmul import Unscaled, load_once
from .pdl import release, supported, wait

MAX_TOKENS = matmul.MAX_TOKENS
FEW_TOKENS = 16
"""Rows of x up to which this is as fast as cuBLAS for every weight."""
MOST_ROWS = 32768
"""Of a weight, for more tokens than FEW_TOKENS: with more, such as an output head's, cuBLAS is as fast."""


def linear(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """act(x Wᵀ + b) `[num_tokens, size]`, or act(gate) * up where W holds the rows of gate, then those of up.

    x: `[num_tokens, in]`, num_tokens up to MAX_TOKENS, or such rows from `add_norm`; weight: `[size, in]`, gated:
    `[2 * size, in]`; bias: as many as the weight's rows. All contiguous. Sums are in fp32, in an order that depends on the
    shapes alone.

    NOTE: on Hopper the kernel reads `weight` before the kernel ahead of it has ended (see `pdl`): that kernel
    must not write the weight.

    Raises ValueError for more tokens, other columns, an unknown activation, or tensors that are not contiguous.
    """
    if isinstance(x, Unscaled):
        rows = x.x
        _check(rows, weight, least=2)
    else:
        rows = x
        _check(rows, weight)
    num_tokens, in_features = rows.shape
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if activation is not None:
        check_kind(activation)
    if out is None:
        out = torch.empty((num_tokens, size), dtype=rows.dtype, device=rows.device)
    if num_tokens > 1:
        return matmul.matmul(x, weight, None, bias, activation, gated, out)
    if num_tokens:
        tile, columns, warps = (4, 1024, 2) if in_features <= 1024 else (2, 2048, 4)
        pdl = supported(rows.device)
        _vector_kernel[(-(-size // tile),)](
            rows,
            weight,
            weight if bias is None else bias,
            out,
            size,
            in_features,
            ROWS=tile,
            COLUMNS=columns,
            EVEN=in_features % columns == 0,
            BIASED=bias is not None,
            KIND=activation or "",
            GATED=gated,
            PDL=pdl,
            launch_pdl=pdl,
            num_warps=warps,
        )
    return out


def add_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    squares: Tensor,
    bias: Tensor | None = None,
) -> Unscaled:
    """norm(x Wᵀ + b + residual), as `linear` takes it, for 2 to MAX_TOKENS tokens; norm is that of `norm.add_rms_norm`.
    `residual` becomes the sum, rounded, of which the statistics are.

    residual: `[num_tokens, size]`; norm_weight: `[size]`; squares: fp64 `[num_tokens]`, zeros, which
    become part of the result. The rest is as in `linear`.
    The rows are rounded before each is divided by its own root mean square, so they must fit their type: bf16, not fp16.

    Raises ValueError as `linear` does, for another number of tokens, and for rows in fp16.
    """
    _check(x, weight, least=2)
    if not residual.is_contiguous() or residual.shape != (len(x), len(weight)):
        raise ValueError(
            f"the residual must be contiguous, [{len(x)}, {len(weight)}], not {list(residual.shape)}"
        )
    if x.dtype == torch.float16:
        raise ValueError("rows that are not scaled yet may not fit float16")
    if squares.dtype != torch.float64 or not squares.is_contiguous() or squares.shape != (len(x),):
        raise ValueError(
            f"squares must be {len(x)} numbers in float64 side by side, not {squares.shape} in {squares.dtype}"
        )
    return matmul.add_norm(x, weight, bias, matmul.Norm(residual, norm_weight, eps, squares))


def _check(x: Tensor, weight: Tensor, least: int = 0) -> None:
    if len(x) > MAX_TOKENS:
        raise ValueError(f"{len(x)} rows are more than {MAX_TOKENS}")
    if len(x) < least:
        raise ValueError(f"{len(x)} rows are fewer than {least}")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and the weight must be contiguous")


def fits(num_tokens: int, weight: Tensor) -> bool:
    """Whether `linear` is at least as fast as cuBLAS, as measured on an H200 within chains of kernels."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
        return False
    rows, columns = weight.shape
    if num_tokens <= FEW_TOKENS:
        return columns % 16 == 0
    # With other columns more tokens have not been measured.
    return num_tokens <= MAX_TOKENS and columns % matmul.COLUMNS == 0 and rows <= MOST_ROWS


@triton.jit
def _sums_by_eight(weight, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The products of a tile with x, summed within each thread: `[rows, columns / 8]`."""
    products = weight.to(tl.float32) * x.to(tl.float32)
    return tl.sum(tl.reshape(products, [ROWS, COLUMNS // 8, 8]), 2)


@triton.jit
def _load_bias(pointers, BIASED: tl.constexpr, ROWS: tl.constexpr):
    if BIASED:
        bias = tl.load(pointers).to(tl.float32)
    else:
        bias = tl.zeros([ROWS], tl.float32)
    return bias


@triton.jit
def _vector_kernel(
    x_ptr,
    weight_ptr,
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
    release(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    column = tl.arange(0, COLUMNS)[None, :]
    rows = weight_ptr + (row.to(tl.int64) * in_features)[:, None]
    weight = load_once(rows + column, column < in_features, EVEN)
    acc = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
    if GATED:
        up_rows = rows + tl.cast(size, tl.int64) * in_features
        up = load_once(up_rows + column, column < in_features, EVEN)
        up_acc = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
        up_bias = _load_bias(bias_ptr + size + row, BIASED, ROWS)
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    wait(PDL)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    for start in range(0, last, COLUMNS):
        x = tl.load(x_ptr + start + column)
        after = start + COLUMNS + column
        weight_after = load_once(rows + after, after < in_features, EVEN)
        acc += _sums_by_eight(weight, x, ROWS, COLUMNS)
        weight = weight_after
        if GATED:
            up_after = load_once(up_rows + after, after < in_features, EVEN)
            up_acc += _sums_by_eight(up, x, ROWS, COLUMNS)
            up = up_after
    column += last
    if EVEN:
        x = tl.load(x_ptr + column)
    else:
        x = tl.load(x_ptr + column, mask=column < in_features, other=0.0)
    y = tl.sum(acc + _sums_by_eight(weight, x, ROWS, COLUMNS), 1) + bias
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= tl.sum(up_acc + _sums_by_eight(up, x, ROWS, COLUMNS), 1) + up_bias
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))
