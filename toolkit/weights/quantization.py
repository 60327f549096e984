"""The formats of the weights of the model that is being built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from toolkit.distributed import Shard, full_shard
from toolkit.errors import ConfigError
from toolkit.kernels import cpu
from toolkit.kernels.switch import kernels_are_off, rounds_inputs
from toolkit.kernels.table import triton_kernels_for
from toolkit.weights.formats import Packing, Packings
from toolkit.weights.kinds import fp8
from toolkit.weights.kinds.blocks import BlockWeight
from toolkit.weights.kinds.fp8 import FP8Weight
from toolkit.weights.kinds.grouped import grouped_weight
from toolkit.weights.kinds.int8 import Int8Weight
from toolkit.weights.kinds.integers import IntegerWeight
from toolkit.weights.kinds.mxfp4 import MXFP4Weight
from toolkit.weights.kinds.parted import PartedWeight
from toolkit.weights.kinds.plain import plain_weight
from toolkit.weights.layout import (
    DENSE,
    MXFP4,
    MXFP4_AS_INTEGERS,
    Kind,
    Layout,
    of_experts,
    while_loading,
)
from toolkit.weights.weight import StackableWeight, Weight

METHODS: dict[str, type[FP8Weight | Int8Weight | IntegerWeight]] = {
    "fp8": FP8Weight,
    "int8": Int8Weight,
    "int4": IntegerWeight,
}


INT8 = Layout(Kind.INTEGERS, 8)
"""A scale for each row, as `Int8Weight` has."""


@dataclass(frozen=True, slots=True)
class _Formats:
    method: str | None = None  # of METHODS, for a checkpoint in full precision
    packings: Packings | None = None  # of a quantized checkpoint
    device: torch.device | None = None  # that will compute. None: the default device


_PLAIN = _Formats()
_building: ContextVar[_Formats] = ContextVar("formats", default=_PLAIN)


def require(method: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if the device and activations in `dtype` do not support the method.

    PyTorch alone supports every method everywhere."""
    if method is not None and not kernels_are_off():
        METHODS[method].require(device, dtype)


@contextmanager
def quantized(
    method: str | None, packings: Packings | None = None, device: torch.device | None = None
) -> Iterator[None]:
    """Build linear layers inside with weights of this kind. None: of the default dtype.

    `packings`: of the checkpoint, if it is quantized; `device`: that will compute, if that is not
    the default device."""
    token = _building.set(_Formats(method, packings, device))
    try:
        yield
    finally:
        _building.reset(token)


@contextmanager
def unquantized(dtype: torch.dtype | None = None) -> Iterator[None]:
    """Build linear layers inside that are plain, whatever the model's format.

    dtype: of their weights. None: the default dtype."""
    token, before = _building.set(_PLAIN), torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        _building.reset(token)


def find_packing(name: str) -> Packing | None:
    """Return how the checkpoint of the model being built stores a projection. None: plainly."""
    packings = _building.get().packings
    return None if packings is None else packings.find(name)


def new_weight(rows: int, columns: int) -> Weight:
    """Return an uninitialized weight for a linear layer that is not quantized in its checkpoint."""
    method = _building.get().method
    if method is None:
        return plain_weight(rows, columns)
    if method == "int4":
        return _weight(rows, columns, while_loading(method, columns))
    return FP8Weight(rows, columns) if method == "fp8" else Int8Weight(rows, columns)


def new_packed_weight(
    rows: Sequence[int],
    columns: Shard,
    packings: Sequence[Packing | None],
    cuts_blocks: Callable[[int, int], bool] = lambda index, height: False,
) -> Weight:
    """Return an uninitialized weight for parts of so many rows, stored in these packings.

    cuts_blocks(index of a part, rows of a block): its rows are not complete blocks in the file."""
    layouts = [DENSE if one is None else usable(one.layout, target_device()) for one in packings]
    for index, one in enumerate(layouts):
        if one.kind is Kind.FP8 and cuts_blocks(index, one.block_rows):
            layouts[index] = DENSE
    # Of columns that are not in order, a rank's part does not have complete groups.
    layouts = [DENSE if one.has_order and not columns.is_full else one for one in layouts]
    merged: list[tuple[int, Layout]] = []
    for count, layout in zip(rows, layouts, strict=True):
        above, before = merged[-1] if merged else (0, None)
        if layout == before and not layout.has_order and above % layout.block_rows == 0:
            merged[-1] = above + count, layout
        else:
            merged.append((count, layout))
    weights = [_weight(count, columns.count, layout) for count, layout in merged]
    return weights[0] if len(weights) == 1 else PartedWeight(weights)


def new_stack(
    count: int, rows: Sequence[int], columns: int, packings: Iterable[Packing | None]
) -> StackableWeight:
    """Return an uninitialized weight for `count` experts on a GPU, with parts of so many rows each.

    packings: of all parts. Weights that differ, or that the kernels do not multiply, are expanded
    to the type of the model while loading. Raises ConfigError for other kinds."""
    total, found = count * sum(rows), set(packings)
    if found == {None}:
        weight = new_weight(total, columns)
        if isinstance(weight, StackableWeight):
            return weight
        raise ConfigError(
            f"--quantization {_building.get().method}: models with experts run on GPUs with fp8 "
            f"or, in bfloat16 and float16, int4, if the columns of each device ({columns} here) "
            "are a multiple of 64.",
            param="quantization",
        )
    layouts = {DENSE if one is None else one.layout for one in found}
    in_float32 = torch.get_default_dtype() == torch.float32
    layout = of_experts(layouts, rows, columns, in_float32=in_float32)
    if layout == MXFP4:
        return MXFP4Weight(total, columns)
    weight = _weight(total, columns, usable(layout, target_device()))
    return weight if isinstance(weight, StackableWeight) else plain_weight(total, columns)


def _weight(rows: int, columns: int, layout: Layout) -> Weight:
    if layout.kind is Kind.DENSE:
        return plain_weight(rows, columns)
    if layout.kind is Kind.FP8:
        if layout.block_rows == 1:
            return FP8Weight(rows, columns)
        return BlockWeight(rows, columns)
    if layout == INT8 and _multiplies_int8():
        return Int8Weight(rows, columns)
    return grouped_weight(rows, columns, layout, target_device()) or IntegerWeight(
        rows, columns, layout
    )


def usable(layout: Layout, device: torch.device) -> Layout:
    """Return the layout, or the one that the device multiplies with instead."""
    if layout.kind is Kind.MXFP4:
        return MXFP4_AS_INTEGERS
    if layout.kind is not Kind.FP8:
        return layout
    # Without kernels, PyTorch rounds as they do, or multiplies with dequantized weights.
    has_products = rounds_inputs() if kernels_are_off() else triton_kernels_for(device) is not None
    return layout if fp8.has_arithmetic(device) and has_products else DENSE


def target_device() -> torch.device:
    """Return the device that will compute the model being built."""
    return _building.get().device or torch.get_default_device()


def _multiplies_int8() -> bool:
    """Return True if the device has products of int8 with a scale for each row."""
    has_kernels = cpu.available() or kernels_are_off()
    is_wide = torch.get_default_dtype() != torch.float16
    return target_device().type == "cpu" and has_kernels and is_wide


def new_head_weight(rows: int, columns: int, packing: Packing | None = None) -> Weight:
    """Return an uninitialized weight for an output head, which an embedding may share."""
    if packing is not None:
        return new_packed_weight([rows], full_shard(columns), [packing])
    return Int8Weight(rows, columns) if quantizes_head() else plain_weight(rows, columns)


def linear_bytes(itemsize: int) -> float:
    """Return the least bytes of a parameter of linear layers. `itemsize`: of the model's type."""
    method = _building.get().method
    return itemsize if method is None else METHODS[method].BYTES


def quantizes_head() -> bool:
    """Return whether the output head of the model being built is quantized too, to int8.

    On a CPU it is: small models spend a third of their time there. On GPUs the head keeps the
    checkpoint's precision, which matters most there."""
    method = _building.get().method
    return method == "int8" or (method == "int4" and _multiplies_int8())
