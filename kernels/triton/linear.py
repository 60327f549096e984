"""Products of few rows with a weight: every decode step is mostly these, and they are bound by reading the
weight.

Each program reads some rows of the weight from end to end. One row of x is multiplied in registers
(`_vector_kernel`); up to 16 are a tile for the tensor cores (`_dot_kernel`); for more see `matmul`. Where it pays,
the first columns of the weight are asked for before the kernel waits for the one that computes x. Results do not
depend on which program comes first.
"""

# mypy: allow-incomplete-defs
# Triton annotates the constexpr parameters of a kernel and no others.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import matmul
from .activation import apply, check_kind
from .pdl import fetch, release, supported, wait

FEW_TOKENS = 16
"""Rows of x that `_dot_kernel` takes."""
MAX_TOKENS = matmul.TOKENS
MOST_ROWS = 32768
"""Of a weight, for more tokens than FEW_TOKENS: with more, such as an output head's, cuBLAS is as fast."""
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


class Tile(NamedTuple):
    """The shape of one program."""

    rows: int
    """Rows of the weight."""
    columns: int
    """Columns of the weight per step of the loop, and part."""
    parts: int
    """Runs of columns side by side, each for warps of its own, whose sums are added up in the end."""
    warps: int
    stages: int
    fetched: int
    """Columns asked for, into the L2 cache, before the kernel waits; a multiple of 64."""


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """act(x Wᵀ + b) `[num_tokens, size]`, or act(gate) * up where W holds the rows of gate, then those of up.

    x: `[num_tokens, in]`, num_tokens up to MAX_TOKENS, above FEW_TOKENS for `in` a multiple of 128; weight: `[size, in]`,
    gated: `[2 * size, in]`; bias: as many as the weight's rows. All contiguous. Sums are in fp32, in an order that
    depends on the shapes alone.

    NOTE: on Hopper the kernel reads `weight` before the kernel ahead of it has ended (see `pdl`): that kernel
    must not write the weight.

    Raises ValueError for more tokens, other columns, an unknown activation, or tensors that are not contiguous.
    """
    num_tokens, in_features = x.shape
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if activation is not None:
        check_kind(activation)
    if num_tokens > MAX_TOKENS:
        raise ValueError(f"{num_tokens} rows are more than {MAX_TOKENS}")
    if num_tokens > FEW_TOKENS and in_features % matmul.COLUMNS:
        raise ValueError(
            f"for {num_tokens} rows the columns, {in_features}, must be a multiple of {matmul.COLUMNS}"
        )
    if not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError("x and the weight must be contiguous")
    if out is None:
        out = torch.empty((num_tokens, size), dtype=x.dtype, device=x.device)
    if num_tokens > FEW_TOKENS and tile is None:
        return matmul.matmul(x, weight, bias, activation, gated, out)
    tile = tile or _tile(num_tokens, size, in_features, gated)
    pdl = supported(x.device)
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
    grid = (-(-size // tile.rows),)
    tensors = (x, weight, weight if bias is None else bias, out)
    if num_tokens == 1:
        _vector_kernel[grid](*tensors, size, in_features, **options)
    else:
        options |= {"PARTS": tile.parts, "STAGES": tile.stages, "FETCHED": tile.fetched if pdl else 0}
        _dot_kernel[grid](*tensors, num_tokens, size, in_features, TOKENS=FEW_TOKENS, **options)
    return out


def fits(num_tokens: int, weight: Tensor) -> bool:
    """Whether `linear` is at least as fast as cuBLAS, as measured on an H200 within chains of kernels."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or not weight.is_contiguous():
        return False
    rows, columns = weight.shape
    if num_tokens <= FEW_TOKENS:
        return columns % 16 == 0
    return num_tokens <= MAX_TOKENS and columns % matmul.COLUMNS == 0 and rows <= MOST_ROWS


def _tile(num_tokens: int, size: int, in_features: int, gated: bool) -> Tile:
    """The fastest shapes measured on an H200, as few as come near the best of each size.

    For more than one token, what counts is that the programs fill the 132 multiprocessors in one wave, or in
    many.
    """
    if num_tokens == 1:
        return Tile(4, 1024, 1, 2, 1, 0) if in_features <= 1024 else Tile(2, 2048, 1, 4, 1, 0)
    if gated:
        return Tile(8, 128, 1, 1, 4, 0)
    if size >= 32768:
        return Tile(32, 128, 1, 1, 3, 0)
    if size > 2 * 132 * 16:
        return Tile(16, 128, 1, 1, 6, 512)
    if size < 1024:
        return Tile(8, 64, 4, 4, 6, 512)
    if in_features < 1024:
        return Tile(8, 64, 2, 2, 4, 512)
    return Tile(16, 128, 4, 4, 4, 512)


@triton.jit
def _load(pointers, live, MASKED: tl.constexpr):
    """A tile of the weight, which no one will ask for again soon."""
    if MASKED:
        tile = tl.load(pointers, mask=live, other=0.0, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, eviction_policy="evict_first")
    return tile


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
    weight = _load(rows + column, column < in_features, not EVEN)
    acc = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
    if GATED:
        up_rows = rows + tl.cast(size, tl.int64) * in_features
        up = _load(up_rows + column, column < in_features, not EVEN)
        up_acc = tl.zeros([ROWS, COLUMNS // 8], tl.float32)
        up_bias = _load_bias(bias_ptr + size + row, BIASED, ROWS)
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    wait(PDL)
    last = (tl.cdiv(in_features, COLUMNS) - 1) * COLUMNS
    for start in range(0, last, COLUMNS):
        x = tl.load(x_ptr + start + column)
        after = start + COLUMNS + column
        weight_after = _load(rows + after, after < in_features, not EVEN)
        acc += _sums_by_eight(weight, x, ROWS, COLUMNS)
        weight = weight_after
        if GATED:
            up_after = _load(up_rows + after, after < in_features, not EVEN)
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


@triton.jit
def _fetch(rows, in_features, COLUMNS: tl.constexpr):
    """Ask for the first columns of rows, an element of every 128 bytes."""
    column = tl.minimum(tl.arange(0, COLUMNS // 64) * 64, in_features - 1)
    fetch(rows[:, None] + column[None, :])


@triton.jit
def _dot(x, weight, acc, PARTS: tl.constexpr):
    """x @ weightᵀ + acc in fp32. The interpreter multiplies bf16 numbers' bits, so it gets them widened."""
    if INTERPRETED:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if PARTS == 1:
        weight = tl.trans(weight)
    else:
        weight = tl.trans(weight, 0, 2, 1)
    return tl.dot(x, weight, acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def _dot_kernel(
    x_ptr,
    weight_ptr,
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
    """ROWS outputs of every token. Tiles are `[tokens or rows, columns]`, of several parts `[parts, ...,
    columns]`.

    Rows past the last one are the last one again.
    """
    STEP: tl.constexpr = PARTS * COLUMNS
    release(PDL)
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), size - 1)
    token = tl.arange(0, TOKENS)
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
    bias = _load_bias(bias_ptr + row, BIASED, ROWS)
    if GATED:
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
    y = acc + bias[None, :]
    if KIND != "":
        y = apply(y, KIND)
    if GATED:
        y *= up_acc + up_bias[None, :]
    out = out_ptr + (token * size)[:, None] + row[None, :]
    tl.store(out, y.to(out_ptr.dtype.element_ty), mask=(token < num_tokens)[:, None])
