"""FP8 weights (e4m3), with a scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.table import kernels_for
from toolkit.weights.row_scaled import RowScaledWeight
from toolkit.weights.weight import Epilogue

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows

DTYPE = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)  # ada, the first GPUs with FP8 arithmetic


class FP8Weight(RowScaledWeight):
    values_dtype = DTYPE

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        kernels = kernels_for(self.values.device)
        self._product = reference.linear_fp8 if kernels is None else kernels.fp8_product

    @staticmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        problem = None
        if not has_arithmetic(device):
            problem = "needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or later"
        elif kernels_for(device) is None:
            problem = "needs the package triton"
        elif dtype not in (torch.bfloat16, torch.float16):
            problem = "needs activations in 16 bits: --dtype bfloat16 or float16"
        if problem:
            raise ConfigError(f"--quantization fp8 {problem}.", param="quantization")

    @staticmethod
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = reference.quantize_fp8(weight)
        return values, scales[:, 0]

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        bias, activation, gated, dtype, _ = epilogue
        y = self._product(x, self.values, self.scales, bias, activation, gated=gated)
        return y if dtype is None else y.to(dtype)


def has_arithmetic(device: torch.device) -> bool:
    """Return True for a GPU that converts and multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
