"""Weights of eight bits, with a scale for each row."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from toolkit.kernels import reference
from toolkit.kernels.switch import kernels_are_off, rounds_inputs
from toolkit.weights.weight import ALL, DUMMY_STD, Epilogue, QuantizingWeight, parameter

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows

ScaledProduct = Callable[..., torch.Tensor]
"""A function with the parameters of `reference.linear_scaled`."""
Quantize = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class RowScaledWeight(QuantizingWeight):
    """values · scales[:, None]. Checkpoints are quantized as they are loaded."""

    values_dtype: ClassVar[torch.dtype]

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.values = parameter(torch.empty(rows, columns, dtype=self.values_dtype))
        self.scales = torch.empty(rows, dtype=torch.float32)
        self.dtype = torch.get_default_dtype()
        self._product = self.choose_product(self.values.device)
        if kernels_are_off():
            self._product = (
                _rounding_product(self.quantize) if rounds_inputs() else reference.linear_scaled
            )

    @staticmethod
    @abc.abstractmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError if products with activations in `dtype` cannot run."""

    @staticmethod
    @abc.abstractmethod
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values [rows, columns], fp32 scales [rows]) of a weight in any type."""

    @staticmethod
    @abc.abstractmethod
    def choose_product(device: torch.device) -> ScaledProduct:
        """Return the product before `finish`."""

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        bias, activation, gated, dtype, _, factors = epilogue
        product = self._product if factors is None else partial(self._product, factors=factors)
        y = product(x, self.values, self.scales, bias, activation, gated=gated)
        return y if dtype is None else y.to(dtype)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        # Not every device copies FP8 by index.
        values = self.values.view(torch.int8)[ids].view(self.values_dtype)
        return (values.float() * self.scales[ids, None]).to(self.dtype)

    def store(self, rows: slice, weight: torch.Tensor) -> None:
        values, scales = self.quantize(weight)
        self.values[rows].copy_(values)
        self.scales[rows].copy_(scales)

    def fill_randomly(self, generator: torch.Generator) -> None:
        weight = torch.empty(self.shape, device=self.values.device)
        self.store(ALL, weight.normal_(0.0, DUMMY_STD, generator=generator))

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return self.values[rows].float() * self.scales[rows, None]

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        self.scales[rows].mul_(factor)


def _rounding_product(quantize: Quantize) -> ScaledProduct:
    """Return a product that rounds its input as kernels do, but computes in fp32."""

    def product(
        x: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
        activation: str | None,
        gated: bool,
    ) -> torch.Tensor:
        rows, row_scales = quantize(x)
        rounded = rows.float() * row_scales[:, None]
        y = reference.linear_scaled(rounded, values, scales, bias, activation, gated)
        return y.to(x.dtype)

    return product
