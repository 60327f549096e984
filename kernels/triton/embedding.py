"""Rows of a rank's share of an embedding table."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .pdl import release, supported, wait

CHUNK = 4096  # numbers of a row that a program copies


def embed_shard(indices: Tensor, table: Tensor, begin: int, count: int) -> Tensor:
    """Return rows `[n, size]` of a table that has `count` rows from `begin` on, or zeros.

    indices: int32 or int64 `[n]`; table: `[count or more, size]`. Both contiguous."""
    if not indices.is_contiguous() or not table.is_contiguous():
        raise ValueError("indices and table must be contiguous")
    size = table.shape[1]
    out = torch.empty(len(indices), size, dtype=table.dtype, device=table.device)
    pdl = supported(table.device)
    chunk = min(CHUNK, triton.next_power_of_2(size))
    _embed_kernel[(len(indices), triton.cdiv(size, chunk))](
        indices,
        table,
        out,
        begin,
        count,
        size,
        CHUNK=chunk,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=4,
    )
    return out


def place_rows(x: Tensor, table: Tensor, index: Tensor, column: int, *, adds: bool) -> None:
    """Compute `reference.place_rows`. All are contiguous."""
    if not (x.is_contiguous() and table.is_contiguous() and index.is_contiguous()):
        raise ValueError("rows, table and index must be contiguous")
    num_tokens, size = x.shape
    chunk = min(CHUNK, triton.next_power_of_2(size))
    _place_kernel[(num_tokens, triton.cdiv(size, chunk))](
        x, table, index, size, table.shape[1], column, CHUNK=chunk, ADDS=adds, num_warps=4
    )


@triton.jit
def _place_kernel(
    x_ptr, table_ptr, index_ptr, size, width, first, CHUNK: tl.constexpr, ADDS: tl.constexpr
):
    """Place one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_ptr + row).to(tl.int64)
    if index >= 0:
        column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        inside = column < size
        value = tl.load(table_ptr + index * width + first + column, mask=inside, other=0.0)
        target_ptr = x_ptr + row * size + column
        if ADDS:
            old = tl.load(target_ptr, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + old).to(value.dtype)
        tl.store(target_ptr, value, mask=inside)


@triton.jit(do_not_specialize=["begin", "count"])
def _embed_kernel(
    index_ptr, table_ptr, out_ptr, begin, count, size, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """Copy one chunk of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    wait(PDL)
    release(PDL)
    index = tl.load(index_ptr + row).to(tl.int64) - begin
    here = (index >= 0) & (index < count)
    x = tl.load(table_ptr + index * size + column, mask=here & (column < size), other=0.0)
    tl.store(out_ptr + row * size + column, x, mask=column < size)
