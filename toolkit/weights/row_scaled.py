"""Weights of eight bits, with a scale for each row."""

from __future__ import annotations

import abc
from typing import ClassVar

import torch

from toolkit.distributed import Shard
from toolkit.weights.slots import QuantizedSlot, Slot
from toolkit.weights.weight import ALL, Weight, parameter


class RowScaledWeight(Weight):
    """values · scales[:, None]. Checkpoints are quantized as they are loaded."""

    values_dtype: ClassVar[torch.dtype]

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.values = parameter(torch.empty(rows, columns, dtype=self.values_dtype))
        self.scales = torch.empty(rows, dtype=torch.float32)
        self.dtype = torch.get_default_dtype()

    @staticmethod
    @abc.abstractmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        """Raise ConfigError if products with activations in `dtype` cannot run."""

    @staticmethod
    @abc.abstractmethod
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values [rows, columns], fp32 scales [rows]) of a weight in any type."""

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def take(self, ids: torch.Tensor) -> torch.Tensor:
        # Not every device copies FP8 by index.
        values = self.values.view(torch.int8)[ids].view(self.values_dtype)
        return (values.float() * self.scales[ids, None]).to(self.dtype)

    def part_slots(
        self,
        rows: slice,
        shards: tuple[Shard, Shard],
        *,
        transpose: bool = False,
        order: tuple[int, ...] | None = None,
    ) -> dict[str, Slot]:
        slot = QuantizedSlot(
            self.values[rows],
            transpose,
            shards,
            order,
            scales=self.scales[rows],
            quantize=self.quantize,
        )
        return {"weight": slot}

    def dequantize(self, rows: slice = ALL) -> torch.Tensor:
        return self.values[rows].float() * self.scales[rows, None]

    def multiply(self, factor: float, rows: slice = ALL) -> None:
        self.scales[rows].mul_(factor)
