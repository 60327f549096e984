"""Weights with a scale for each group of columns, in the layout of the GPU's kernels."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

import torch

from toolkit.kernels import reference
from toolkit.kernels.table import triton_kernels_for
from toolkit.weights.groups import Decoded, Groups, fill_randomly_, quantize
from toolkit.weights.layout import Layout
from toolkit.weights.weight import (
    ALL,
    DUMMY_STD,
    Epilogue,
    QuantizingWeight,
    StackableWeight,
    parameter,
)

if TYPE_CHECKING:
    from toolkit.kernels.table import TritonKernels
    from toolkit.kernels.triton.products.grouped_layout import Grouped
    from toolkit.kernels.triton.products.matmul import Unscaled
    from toolkit.weights.weight import Rows


logger = logging.getLogger(__name__)


def grouped_weight(
    rows: int, columns: int, layout: Layout, device: torch.device
) -> GroupedWeight | None:
    """Return an uninitialized weight for the kernels of `device`.

    None: they do not support its shape, or the type of the model."""
    kernels, dtype = triton_kernels_for(device), torch.get_default_dtype()
    if kernels is None or dtype not in (torch.bfloat16, torch.float16):
        return None
    if layout.stored_group(columns) is None:
        _warn_of(str(layout), columns)
        return None
    grouped = kernels.empty_groups(
        (rows, columns),
        layout.bits,
        layout.group or columns,
        getattr(torch, layout.scale_type),
        getattr(torch, layout.offset_type) if layout.offset_type else None,
    )
    return None if grouped is None else GroupedWeight(grouped, layout, kernels)


@cache
def _warn_of(layout: str, columns: int) -> None:
    logger.warning(
        "weights of %d columns in %s are slow: kernels need groups of a multiple of 16 columns, "
        "and a multiple of 64 columns (int4) or 32 (int8) in all, on each rank",
        columns,
        layout,
    )


class GroupedWeight(QuantizingWeight, StackableWeight):
    """A weight in the layout of `Groups`, arranged for the kernels."""

    adds_deltas = True

    def __init__(self, grouped: Grouped, layout: Layout, kernels: TritonKernels) -> None:
        super().__init__(*grouped.shape)
        self.layout, self.dtype = layout, torch.get_default_dtype()
        self._kernels, self.grouped = kernels, grouped
        # As parameters they are part of the kind of a step, which its kernels depend on.
        self.values = parameter(grouped.values)
        self.scales = parameter(grouped.scales)
        self.offsets = None if grouped.offsets is None else parameter(grouped.offsets)
        self.expanded: torch.Tensor | None = None
        """The weight in the type of the model, if it is kept for products of many rows."""
        columns = self.shape[1]
        # Steps may run before the weight is loaded.
        self.order = (
            parameter(torch.arange(columns, dtype=torch.int32)) if layout.has_order else None
        )

    @property
    def nbytes(self) -> int:
        return self.grouped.nbytes + (0 if self.order is None else self.order.nbytes)

    @property
    def expanded_bytes(self) -> int:
        """Bytes that `keep_expanded` takes."""
        rows, columns = self.shape
        return rows * columns * self.dtype.itemsize

    def keep_expanded(self) -> None:
        """Keep the weight in the type of the model, too. Called once, after loading."""
        self.expanded = self._kernels.expand_groups(self.grouped, self.dtype)

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert not isinstance(x, reference.Rounded), "see reads_rounded"
        bias, activation, gated, _, out, factors = epilogue
        if self.order is not None:
            assert isinstance(x, torch.Tensor), "see fuses_norm"
            x = x.index_select(1, self.order)
        return self._kernels.grouped_product(
            x, self.grouped, bias, activation, gated, out, factors, self.expanded
        )

    def stack(self, count: int) -> reference.Stack:
        assert self.order is None, "see quantization.new_stack"

        def by_expert(numbers: torch.Tensor) -> torch.Tensor:
            parts = numbers.view(len(numbers), count, -1, *numbers.shape[2:])
            return parts.transpose(0, 1)

        offset = None if self.offsets is None else by_expert(self.offsets)
        return reference.Stack(by_expert(self.values), by_expert(self.scales), offset=offset)

    def fuses_norm(self, num_tokens: int) -> bool:
        if self.order is not None or self.dtype != torch.bfloat16:
            return False
        return self._kernels.fuses_grouped_norm(num_tokens)

    def add_norm(
        self,
        x: torch.Tensor,
        epilogue: Epilogue,
        residual: torch.Tensor,
        norm: reference.Norm,
        square_sums: torch.Tensor,
    ) -> Unscaled:
        return self._kernels.grouped_add_norm(
            x,
            self.grouped,
            residual,
            norm.weight,
            norm.eps,
            square_sums,
            epilogue.bias,
            epilogue.factors,
        )

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return self._expand(ids, self.dtype)

    def store(self, rows: slice, weight: torch.Tensor) -> None:
        self.write(rows, quantize(weight, self.layout.bits, self.layout.group))

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Groups)
        if self.order is not None:
            assert decoded.order is not None
            self.order.copy_(decoded.order)
        self._kernels.arrange_groups(
            decoded.values,
            decoded.scales,
            decoded.offsets,
            self.layout.group or self.shape[1],
            self.grouped,
            rows.start or 0,
        )

    def fill_randomly(self, generator: torch.Generator) -> None:
        fill_randomly_(self.values.view(torch.int16), self.layout.bits, generator)
        # The standard deviation of integers, uniform from 0 to n - 1, is n / sqrt(12).
        scale = DUMMY_STD * 12**0.5 / 2**self.layout.bits
        self.scales.fill_(scale)
        if self.offsets is not None:
            self.offsets.fill_(-(2 ** (self.layout.bits - 1)) * scale)

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        ids = torch.arange(*rows.indices(self.shape[0]), device=self.values.device)
        return self._expand(ids, torch.float32)

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        # Their type stays, for which kernels were compiled: scales in fp16 may lose digits.
        self.scales[:, rows] *= factor
        if self.offsets is not None:
            self.offsets[:, rows] *= factor

    def _expand(self, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rows = self._kernels.expand_groups(self.grouped.select(ids), dtype)
        if self.order is None:
            return rows
        return torch.empty_like(rows).index_copy_(1, self.order.long(), rows)
