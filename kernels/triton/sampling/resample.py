"""Kernels around a second choice of tokens, for rows of logits that penalties change."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .sampling import check_shape

WIDTH = 4096  # logits per program
ENTRIES = 128


def gather_logits(
    logits: Tensor,
    index: Tensor,
    rows: Tensor,
    positions: Tensor,
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Copy some rows of logits as fp32, with their rows of the state and positions.

    logits: `[n, vocab]`, rows may be strided; index: int32 `[m]`, which to copy; negative: none;
    rows, positions: int32 `[n]`. out: fp32 `[m, vocab]`, int32 `[m]` twice; position -1, row 0 and
    no logits for a negative index. Raises ValueError for logits whose last dimension is strided."""
    _, vocab = check_shape(logits)
    _gather_kernel[(-(-vocab // WIDTH), index.shape[0])](
        logits,
        index,
        rows,
        positions,
        *out,
        logits.stride(0),
        out[0].stride(0),
        vocab,
        WIDTH=WIDTH,
        num_warps=8,
    )


def scatter(values: Tensor, index: Tensor, target: Tensor) -> None:
    """Write values, int32 `[m]`, to `target` at the indices that are not negative, int32 `[m]`."""
    size = index.shape[0]
    _scatter_kernel[(-(-size // ENTRIES),)](
        values, index, target, size, ENTRIES=ENTRIES, num_warps=4
    )


@triton.jit(do_not_specialize_on_alignment=["row_ptr", "position_ptr", "index_ptr"])
def _gather_kernel(
    logits_ptr,
    index_ptr,
    row_ptr,
    position_ptr,
    out_ptr,
    out_row_ptr,
    out_position_ptr,
    stride,
    out_stride,
    vocab,
    WIDTH: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    index = tl.load(index_ptr + entry).to(tl.int64)
    if tl.program_id(0) == 0:
        exists = index >= 0
        tl.store(out_row_ptr + entry, tl.load(row_ptr + index, mask=exists, other=0))
        tl.store(out_position_ptr + entry, tl.load(position_ptr + index, mask=exists, other=-1))
    if index < 0:
        return
    token = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    logits = tl.load(logits_ptr + index * stride + token, mask=token < vocab)
    tl.store(out_ptr + entry * out_stride + token, logits.to(tl.float32), mask=token < vocab)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["index_ptr"])
def _scatter_kernel(value_ptr, index_ptr, target_ptr, size, ENTRIES: tl.constexpr):
    entry = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    index = tl.load(index_ptr + entry, mask=entry < size, other=-1)
    value = tl.load(value_ptr + entry, mask=index >= 0, other=0)
    tl.store(target_ptr + index, value, mask=index >= 0)
