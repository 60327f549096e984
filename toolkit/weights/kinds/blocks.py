"""FP8 weights (e4m3), with a scale for each block of rows and columns. Only checkpoints have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.kernels import reference
from toolkit.kernels.reference import FP8_BLOCK
from toolkit.kernels.switch import kernels_are_off, rounds_inputs
from toolkit.kernels.table import triton_kernels_for
from toolkit.weights.groups import Blocks, Decoded
from toolkit.weights.weight import ALL, DUMMY_STD, Epilogue, StackableWeight, Weight, parameter

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows

BLOCK = FP8_BLOCK, FP8_BLOCK


class BlockWeight(Weight, StackableWeight):
    """A weight in the layout of `Blocks`, which PyTorch expands in float32."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.dtype = torch.get_default_dtype()
        self.values = parameter(torch.empty(rows, columns, dtype=torch.float8_e4m3fn))
        scales = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        self.scales = parameter(torch.empty(scales, dtype=torch.float32))
        is_narrow = self.dtype in (torch.bfloat16, torch.float16)
        self._kernels = triton_kernels_for(self.values.device) if is_narrow else None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @property
    def adds_deltas(self) -> bool:
        return self._kernels is not None

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        bias, activation, gated, dtype, out, factors = epilogue
        if self._kernels is not None:
            return self._kernels.fp8_block_product(
                x, self.values, self.scales, bias, activation, gated, out, factors
            )
        rows = reference.round_to_fp8(x) if kernels_are_off() and rounds_inputs() else x
        y = reference.linear_scaled(rows, self.values, self.scales, bias, activation, gated)
        return y.to(dtype or x.dtype)

    def stack(self, count: int) -> reference.Stack:
        values, scales = (one.view(count, -1, one.shape[1]) for one in (self.values, self.scales))
        return reference.Stack(values, scales)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        # Not every device copies FP8 by index.
        values = self.values.view(torch.int8)[ids].view(torch.float8_e4m3fn)
        scales = self.scales[ids // FP8_BLOCK]
        return Blocks(values, scales, (1, FP8_BLOCK)).dequantize().to(self.dtype)

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Blocks)
        first = (rows.start or 0) // FP8_BLOCK
        self.values[rows].copy_(decoded.values)
        self.scales[first : first + len(decoded.scales)].copy_(decoded.scales)

    def fill_randomly(self, generator: torch.Generator) -> None:
        weight = torch.empty(self.shape, device=self.values.device)
        scale = DUMMY_STD / 16  # most of the numbers have full precision
        self.values.copy_(weight.normal_(0.0, DUMMY_STD / scale, generator=generator))
        self.scales.fill_(scale)

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return Blocks(self.values, self.scales, BLOCK).dequantize()[rows]

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        begin, end, _ = rows.indices(self.shape[0])
        if begin % FP8_BLOCK or (end % FP8_BLOCK and end != self.shape[0]):
            raise ValueError("rows are no multiple of a block")
        self.scales[begin // FP8_BLOCK : -(-end // FP8_BLOCK)].mul_(factor)
