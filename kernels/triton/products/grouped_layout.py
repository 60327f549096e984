"""The order in memory of weights that have a scale for each group of columns.

A word of 16 bits has four columns of int4, or two of int8, that are equally far apart in a step. So
a tile of words is that many operands of adjacent columns: its planes."""

# mypy: allow-incomplete-defs
# Kernels annotate constexpr parameters only.

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from toolkit.kernels.steps import group_and_step

ROWS_AT_ONCE = 8192  # of a weight that is arranged, which takes ten times its memory
EXPANDED_ROWS = 64  # per program


class Grouped(NamedTuple):
    """A weight [rows, columns] in the order of the kernels. See `empty` and `arrange`.

    It is scales · values + offsets; without offsets, integers are less by half of their range."""

    bits: int
    values: Tensor
    """uint16 [steps, rows, words of a step]. Word i of a step has its columns i, i + words, ...,
    from the lowest bits on."""
    scales: Tensor  # [groups, rows], any floating type
    offsets: Tensor | None  # [groups, rows], like the scales
    group: int  # columns with one scale
    columns: int  # of a step
    shape: tuple[int, int]

    @property
    def planes(self) -> int:
        """Columns of a word, operands of a step."""
        return 16 // self.bits

    def select(self, ids: Tensor) -> Grouped:
        """Return some rows."""
        return self._replace(
            values=self.values.view(torch.int16)[:, ids].view(torch.uint16),
            scales=self.scales[:, ids].contiguous(),
            offsets=None if self.offsets is None else self.offsets[:, ids].contiguous(),
            shape=(len(ids), self.shape[1]),
        )

    @property
    def nbytes(self) -> int:
        offsets = 0 if self.offsets is None else self.offsets.nbytes
        return self.values.nbytes + self.scales.nbytes + offsets


def empty(
    shape: tuple[int, int],
    bits: int,
    group: int,
    scale_type: torch.dtype,
    offset_type: torch.dtype | None,
) -> Grouped | None:
    """Return an uninitialized weight. None: the kernels do not support its shape.

    group: columns with one scale."""
    rows, columns = shape
    found = group_and_step(bits, columns, group)
    if found is None:
        return None
    group, step = found
    groups = columns // group, rows
    return Grouped(
        bits,
        torch.empty(columns // step, rows, step * bits // 16, dtype=torch.uint16),
        torch.empty(groups, dtype=scale_type),
        None if offset_type is None else torch.empty(groups, dtype=offset_type),
        group,
        step,
        shape,
    )


def arrange(
    values: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group: int,
    weight: Grouped,
    first: int = 0,
) -> None:
    """Write rows of `weight`, from row `first` on.

    group: columns with one scale; values: uint8 [rows, columns], of 4 bits [rows, columns / 2] with
    the even column in the low half; scales, offsets: [rows, groups]."""
    words = weight.values.view(torch.int16)
    for start in range(0, len(values), ROWS_AT_ONCE):
        part = _words(values[start : start + ROWS_AT_ONCE], weight)
        begin = first + start
        words[:, begin : begin + len(part)].copy_(part.transpose(0, 1))
    groups = weight.shape[1] // weight.group
    for numbers, ours in ((scales, weight.scales), (offsets, weight.offsets)):
        if numbers is not None and ours is not None:
            # The last group of columns may be smaller.
            repeated = numbers.repeat_interleave(group // weight.group, 1)[:, :groups]
            ours[:, first : first + len(numbers)].copy_(repeated.T)


def _words(values: Tensor, weight: Grouped) -> Tensor:
    """Return int16 [rows, steps, words of a step] of values as in `arrange`."""
    if weight.bits == 4:
        values = torch.stack((values & 15, values >> 4), 2)
    planes = weight.planes
    numbers = values.reshape(len(values), -1, planes, weight.columns // planes).int()
    shifts = weight.bits * torch.arange(planes, device=values.device, dtype=torch.int32)
    return (numbers << shifts[:, None]).sum(2, dtype=torch.int32).to(torch.int16)


def expand(weight: Grouped, dtype: torch.dtype) -> Tensor:
    """Return the weight [rows, columns] in `dtype`."""
    rows, columns = weight.shape
    out = torch.empty((rows, columns), dtype=dtype, device=weight.values.device)
    values, scales, offsets = weight.values, weight.scales, weight.offsets
    _expand_kernel[(-(-rows // EXPANDED_ROWS), columns // weight.columns)](
        values,
        scales,
        scales if offsets is None else offsets,
        out,
        rows,
        columns,
        values.stride(1),
        values.stride(0),
        scales.shape[1],
        ROWS=EXPANDED_ROWS,
        COLUMNS=weight.columns,
        GROUP=weight.group,
        PLANES=weight.planes,
        SHIFTED=offsets is not None,
        num_warps=4,
    )
    return out


@triton.jit
def _expand_kernel(
    weight_ptr,
    scale_ptr,
    offset_ptr,
    out_ptr,
    num_rows,
    in_features,
    row_stride,
    step_stride,
    group_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    PLANES: tl.constexpr,
    SHIFTED: tl.constexpr,
):
    """Expand ROWS rows of one step of columns."""
    WIDTH: tl.constexpr = COLUMNS // PLANES
    BITS: tl.constexpr = 16 // PLANES
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    step = tl.program_id(1).to(tl.int64)
    live = row < num_rows
    word = tl.arange(0, WIDTH)[None, :]
    at = row.to(tl.int64) * row_stride + step * step_stride + word
    words = tl.load(weight_ptr + at, mask=live, other=0)
    out = out_ptr + row.to(tl.int64) * in_features + step * COLUMNS + word
    for plane in tl.static_range(PLANES):
        at_group = (step * (COLUMNS // GROUP) + plane * WIDTH // GROUP) * group_stride
        scale = tl.load(scale_ptr + at_group + row, mask=live, other=0.0)
        scale = scale.to(tl.float32)
        numbers = ((words >> (plane * BITS)) & ((1 << BITS) - 1)).to(tl.float32)
        if SHIFTED:
            offset = tl.load(offset_ptr + at_group + row, mask=live, other=0.0)
            numbers = numbers * scale + offset.to(tl.float32)
        else:
            numbers = (numbers - 2.0 ** (BITS - 1)) * scale
        tl.store(out + plane * WIDTH, numbers.to(out_ptr.dtype.element_ty), mask=live)
