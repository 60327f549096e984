"""Weights of integers with a scale for each group of columns: int4, and int8 of checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import cpu, reference
from toolkit.kernels.switch import kernels_are_off, rounds_inputs
from toolkit.weights.groups import Decoded, Groups, fill_randomly_, multiplied, quantize
from toolkit.weights.kinds.packed import pack_groups
from toolkit.weights.layout import Layout
from toolkit.weights.weight import ALL, DUMMY_STD, Epilogue, QuantizingWeight, Weight, parameter

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows

INPUT_GROUP = 32
"""Elements of x that have one scale in products on CPUs, at most."""


class IntegerWeight(QuantizingWeight):
    """A weight in the layout of `Groups`, which our CPU kernels or PyTorch multiply."""

    BYTES = 0.5

    def __init__(self, rows: int, columns: int, layout: Layout) -> None:
        super().__init__(rows, columns)
        self.layout, self.dtype = layout, torch.get_default_dtype()
        groups = columns // layout.group if layout.group else 1

        def empty(size: int, name: str) -> torch.nn.Parameter:
            return parameter(torch.empty(rows, size, dtype=getattr(torch, name)))

        self.values = empty(columns * layout.bits // 8, "uint8")
        self.scales = empty(groups, layout.scale_type)
        self.offsets = empty(groups, layout.offset_type) if layout.offset_type else None
        self.order = (
            parameter(torch.arange(columns, dtype=torch.int32)) if layout.has_order else None
        )

    @staticmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError if the device does not support --quantization int4."""
        if device.type == "cpu" and not cpu.available():
            raise ConfigError(
                f"--quantization int4 needs the CPU kernels, and {cpu.problem()}.",
                param="quantization",
            )

    @property
    def groups(self) -> Groups:
        return Groups(self.layout.bits, self.values, self.scales, self.offsets, self.order)

    @property
    def nbytes(self) -> int:
        return self.groups.nbytes

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        bias, activation, gated, dtype, *_ = epilogue
        groups = self.groups
        if groups.order is not None:
            x, groups = x[:, groups.order], replace(groups, order=None)
        if kernels_are_off() and rounds_inputs() and not x.is_cuda:
            x = reference.round_to_int8(x, min(groups.size, INPUT_GROUP))
        y = reference.linear(x, groups.dequantize().to(x.dtype), bias, activation, gated)
        return y if dtype is None else y.to(dtype)

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        return self.groups.select(ids).dequantize().to(self.dtype)

    def store(self, rows: slice, weight: torch.Tensor) -> None:
        self.write(rows, quantize(weight, self.layout.bits, self.groups.size))

    def fill_randomly(self, generator: torch.Generator) -> None:
        bits = self.layout.bits
        fill_randomly_(self.values, bits, generator)
        # The standard deviation of integers that are uniform from 0 to n - 1 is n / sqrt(12).
        scale = DUMMY_STD * 12**0.5 / 2**bits
        self.scales.fill_(scale)
        if self.offsets is not None:
            self.offsets.fill_(-(2 ** (bits - 1)) * scale)
        if self.order is not None:
            self.order.copy_(torch.arange(len(self.order)))

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Groups)
        self.values[rows].copy_(decoded.values)
        self.scales[rows].copy_(decoded.scales)
        if self.offsets is not None:
            assert decoded.offsets is not None
            self.offsets[rows].copy_(decoded.offsets)
        if self.order is not None:
            assert decoded.order is not None
            self.order.copy_(decoded.order)

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return self.groups.select(rows).dequantize()

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        self.scales = parameter(multiplied(self.scales.detach(), rows, factor))
        if self.offsets is not None:
            self.offsets = parameter(multiplied(self.offsets.detach(), rows, factor))

    def finish(self, epilogue: Epilogue) -> Weight:
        return pack_groups(self.groups, epilogue, self.dtype) or self
