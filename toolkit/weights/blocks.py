"""Weights in FP8 with a scale for each block of rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.kernels import reference
from toolkit.weights.groups import Blocks, Decoded
from toolkit.weights.layout import Layout
from toolkit.weights.weight import ALL, DUMMY_STD, Epilogue, Weight, parameter

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class BlockWeight(Weight):
    """A weight in the layout of `Blocks`, which PyTorch expands. Only checkpoints have it."""

    def __init__(self, rows: int, columns: int, layout: Layout) -> None:
        super().__init__(rows, columns)
        self.layout, self.dtype = layout, torch.get_default_dtype()
        self.block = layout.block_rows, layout.group
        self.values = parameter(torch.empty(rows, columns, dtype=torch.float8_e4m3fn))
        scales = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        self.scales = parameter(torch.empty(scales, dtype=torch.float32))

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        bias, activation, gated, dtype, *_ = epilogue
        y = reference.linear(x, self.dequantize().to(x.dtype), bias, activation, gated)
        return y if dtype is None else y.to(dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        # Not every device copies FP8 by index.
        values = self.values.view(torch.int8)[ids].view(torch.float8_e4m3fn)
        scales = self.scales[ids // self.block[0]]
        return Blocks(values, scales, (1, self.block[1])).dequantize().to(self.dtype)

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Blocks)
        first = (rows.start or 0) // self.block[0]
        self.values[rows].copy_(decoded.values)
        self.scales[first : first + len(decoded.scales)].copy_(decoded.scales)

    def fill_randomly(self, generator: torch.Generator) -> None:
        weight = torch.empty(self.shape, device=self.values.device)
        scale = DUMMY_STD / 16  # most of the numbers have full precision
        self.values.copy_(weight.normal_(0.0, DUMMY_STD / scale, generator=generator))
        self.scales.fill_(scale)

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return Blocks(self.values, self.scales, self.block).dequantize()[rows]

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        begin, end, _ = rows.indices(self.shape[0])
        size = self.block[0]
        if begin % size or (end % size and end != self.shape[0]):
            raise ValueError("rows are no multiple of a block")
        self.scales[begin // size : -(-end // size)].mul_(factor)
