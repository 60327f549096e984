"""Layouts of weights in memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum

from toolkit.kernels.steps import group_and_step

_BYTES = {"": 0, "float16": 2, "bfloat16": 2, "float32": 4}


class Kind(StrEnum):
    DENSE = "dense"  # in the type of the model
    INTEGERS = "integers"  # `groups.Groups`
    FP8 = "fp8"  # e4m3, with a scale for each block of rows and columns
    MXFP4 = "mxfp4"  # `kernels.mxfp4`: of experts on a GPU


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of a weight. Weights of one layout can be parts of one product."""

    kind: Kind = Kind.DENSE
    bits: int = 16
    group: int = 0  # columns with one scale; 0: all
    block_rows: int = 1  # rows with one scale
    scale_type: str = "float32"  # PyTorch's name
    offset_type: str = ""  # empty: no offsets
    has_order: bool = False  # columns are in another order than those of its input

    @property
    def type(self) -> str:
        """Short name of the stored type; empty for that of the model."""
        if self.kind is Kind.INTEGERS:
            return f"int{self.bits}"
        return "" if self.kind is Kind.DENSE else str(self.kind)

    def stored_group(self, columns: int) -> int | None:
        """Return a GPU's columns of integers with one scale. None: as in the layout."""
        found = group_and_step(self.bits, columns, self.group or columns)
        return None if found is None else found[0]

    def nbytes(self, rows: int, columns: int, dense_bytes: int, *, on_gpu: bool = False) -> int:
        """Return the size of a weight. `dense_bytes`: of one parameter of the model's type."""
        if self.kind is Kind.DENSE:
            return rows * columns * dense_bytes
        if self.kind is Kind.MXFP4:
            padded = -(-columns // 128) * 128
            return rows * padded * 17 // 32
        group = self.group
        if on_gpu and self.kind is Kind.INTEGERS:
            group = self.stored_group(columns) or group
        groups = -(-columns // group) if group else 1
        scale_bytes = sum(_BYTES[kind] for kind in (self.scale_type, self.offset_type))
        num_scales = -(-rows // self.block_rows) * groups
        order = 4 * columns if self.has_order else 0
        return rows * columns * self.bits // 8 + num_scales * scale_bytes + order

    def __str__(self) -> str:
        if self.kind is Kind.DENSE:
            return "in the type of the model"
        if self.kind is Kind.MXFP4:
            return "MXFP4"
        if self.kind is Kind.FP8:
            if self.block_rows > 1:
                return f"FP8 in blocks of {self.block_rows} × {self.group}"
            return "FP8 with a scale for each row"
        scales = f"in groups of {self.group}" if self.group else "with a scale for each row"
        return f"int{self.bits} {scales}{', with offsets' if self.offset_type else ''}"


DENSE = Layout()


def of_experts(
    layouts: Collection[Layout], rows: Iterable[int], columns: int, *, in_float32: bool
) -> Layout:
    """Return the one layout of a projection of all experts of a layer on a GPU.

    rows: of each part of the projection; columns: of a rank; in_float32: the model. Dense: there is
    no kernel for what the checkpoint has."""
    layout = next(iter(layouts)) if len(layouts) == 1 else DENSE
    if in_float32 and layout.kind is not Kind.MXFP4:
        return DENSE
    if layout.has_order or any(part % layout.block_rows for part in rows):
        return DENSE
    has_kernel = layout.kind is not Kind.INTEGERS or layout.stored_group(columns) is not None
    return layout if has_kernel else DENSE


MXFP4 = Layout(Kind.MXFP4, 4, 32)
MXFP4_AS_INTEGERS = Layout(Kind.INTEGERS, 8, 32, scale_type="bfloat16")
"""MXFP4 where there are no kernels for it: twice its numbers are integers."""
GROUPS = (128, 64, 32)
"""Columns of a group of weights that are rounded to int4: the first that divides a row."""


def on_device(layout: Layout, *, on_gpu: bool, is_expert: bool) -> Layout:
    """Return the layout in which a device keeps a weight that a checkpoint has in this one."""
    if layout.kind is Kind.MXFP4 and not (on_gpu and is_expert):
        return MXFP4_AS_INTEGERS
    return DENSE if layout.kind is Kind.FP8 and not on_gpu else layout


def while_loading(method: str, columns: int) -> Layout:
    """Return the layout that --quantization `method` gives a weight of full precision."""
    if method == "fp8":
        return Layout(Kind.FP8, 8)
    if method == "int8":
        return Layout(Kind.INTEGERS, 8)
    group = next((size for size in GROUPS if columns % size == 0), 0)
    return Layout(Kind.INTEGERS, 4, group, scale_type="float16")
