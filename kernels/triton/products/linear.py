"""Products of few rows with a weight: most of a decode step, bound by reading the weight.

One row of x is multiplied in registers (`_vector_kernel`); for more, up to 64, see `matmul`. The
first columns of the weight are prefetched before the kernel that computes x has ended. Results do
not depend on the order of programs, except those of `add_norm` in one of about 2**29 rows."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import apply, check_kind
from ..pdl import release, supported, wait
from . import matmul
from .epilogue import (
    Delta,
    Norm,
    load_parts,
    load_row_up,
    load_slot,
    row_arguments,
    row_constants,
    row_delta,
)
from .matmul import Unscaled, load_once

MAX_TOKENS = matmul.MAX_TOKENS
FEW_TOKENS = 16  # rows of x up to which this is as fast as cuBLAS for every weight
MAX_ROWS = 32768
"""Most rows of a weight for more tokens. With more, as in an output head, cuBLAS is as fast."""


def linear(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    delta: Delta | None = None,
) -> Tensor:
    """Return act(x Wᵀ + b), or act(gate) * up if W holds gate's rows, then up's.

    x: `[num_tokens, in]`, num_tokens up to MAX_TOKENS, or a result of `add_norm`; weight: `[size,
    in]`, gated: `[2 * size, in]`; bias: one per row of the weight. All contiguous. Sums are in
    fp32, in an order that depends on the shapes alone. `delta` is added before bias, activation and
    gate. Returns `[num_tokens, size]`.

    NOTE: on Hopper the kernel reads `weight` before the kernel ahead of it ends (see `pdl`): that
    kernel must not write the weight.

    Raises ValueError for more tokens, other columns, an unknown activation, or tensors that are not
    contiguous."""
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
        return matmul.matmul(x, weight, None, bias, activation, gated, out, delta=delta)
    if num_tokens:
        tile, columns, warps = (4, 1024, 2) if in_features <= 1024 else (2, 2048, 4)
        pdl = supported(rows.device)
        _vector_kernel[(-(-size // tile),)](
            rows,
            weight,
            weight if bias is None else bias,
            out,
            *row_arguments(delta, out),
            size,
            in_features,
            ROWS=tile,
            COLUMNS=columns,
            EVEN=in_features % columns == 0,
            BIASED=bias is not None,
            KIND=activation or "",
            GATED=gated,
            **row_constants(delta),
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
    square_sums: Tensor,
    bias: Tensor | None = None,
    delta: Delta | None = None,
) -> Unscaled:
    """Return norm(x Wᵀ + b + residual) as an input of `linear`, for 2 to MAX_TOKENS tokens.

    It is an RMS norm. The rounded sum is written into `residual`; the norm is of that.

    residual: `[num_tokens, size]`; norm_weight: `[size]`, in x's type or fp32; square_sums: fp64
    zeros `[num_tokens]`, which become part of the result. The rest is as in `linear`.
    Rows are rounded before they are divided by their root mean square, so their type must have the
    range: bf16, not fp16.

    Raises ValueError like `linear`, for another number of tokens, and for rows in fp16."""
    _check(x, weight, least=2)
    if not residual.is_contiguous() or residual.shape != (len(x), len(weight)):
        raise ValueError(
            f"the residual must be [{len(x)}, {len(weight)}], contiguous, "
            f"not {list(residual.shape)}"
        )
    if x.dtype == torch.float16:
        raise ValueError("rows that are not scaled yet may overflow float16")
    if (
        square_sums.dtype != torch.float64
        or not square_sums.is_contiguous()
        or square_sums.shape != (len(x),)
    ):
        raise ValueError(
            f"square_sums must be [{len(x)}] in float64, contiguous, "
            f"not {list(square_sums.shape)} in {square_sums.dtype}"
        )
    norm = Norm(residual, norm_weight, eps, square_sums)
    return matmul.add_norm(x, weight, bias, norm, delta=delta)


def _check(x: Tensor, weight: Tensor, least: int = 0) -> None:
    if len(x) > MAX_TOKENS:
        raise ValueError(f"{len(x)} rows are more than {MAX_TOKENS}")
    if len(x) < least:
        raise ValueError(f"{len(x)} rows are fewer than {least}")
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and the weight must be contiguous")


def fits(num_tokens: int, weight: Tensor) -> bool:
    """Return True if `linear` is as fast as cuBLAS, measured on an H200 in chains of kernels."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
        return False
    rows, columns = weight.shape
    if num_tokens <= FEW_TOKENS:
        return columns % 16 == 0
    # More tokens with other columns were not measured.
    return num_tokens <= MAX_TOKENS and columns % matmul.COLUMNS == 0 and rows <= MAX_ROWS


@triton.jit
def _sums_by_eight(weight, x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Multiply a tile by x, summed within each thread: `[rows, columns / 8]`."""
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
    BIASED: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    RANK: tl.constexpr,
    PARTED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute ROWS outputs of the one token. Each tile is loaded while the one before is summed.

    Rows past the last one repeat it."""
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
    num_rows = 2 * size if GATED else size
    if RANK:
        place = tl.load(place_ptr)
        part = load_parts(row_part_ptr + row, PARTED, ROWS)
        if GATED:
            up_part = load_parts(row_part_ptr + size + row, PARTED, ROWS)
    wait(PDL and not RANK)
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
    y = tl.sum(acc + _sums_by_eight(weight, x, ROWS, COLUMNS), 1) + bias
    wait(PDL and RANK)
    if RANK:
        y += row_delta(low_ptr, up_ptr, factor, slot, blocks, part, row, num_rows, RANK)
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        up_y = tl.sum(up_acc + _sums_by_eight(up, x, ROWS, COLUMNS), 1) + up_bias
        if RANK:
            up_y += row_delta(
                low_ptr, up_ptr, up_factor, slot, blocks, up_part, size + row, num_rows, RANK
            )
        y *= up_y
    tl.store(out_ptr + row, y.to(out_ptr.dtype.element_ty))
