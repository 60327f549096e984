"""FP8 weights (e4m3), with a scale for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.table import triton_kernels_for
from toolkit.weights.groups import Blocks, Decoded
from toolkit.weights.kinds.row_scaled import RowScaledWeight, ScaledProduct
from toolkit.weights.weight import Epilogue, StackableWeight

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows

DTYPE = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)  # ada, the first GPUs with FP8 arithmetic


class FP8Weight(RowScaledWeight, StackableWeight):
    BYTES = 1.0
    values_dtype = DTYPE

    @staticmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        problem = None
        if not has_arithmetic(device):
            problem = "needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or later"
        elif triton_kernels_for(device) is None:
            problem = "needs the package triton"
        elif dtype not in (torch.bfloat16, torch.float16):
            problem = "needs activations in 16 bits: --dtype bfloat16 or float16"
        if problem:
            raise ConfigError(f"--quantization fp8 {problem}.", param="quantization")

    @staticmethod
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = reference.quantize_fp8(weight)
        return values, scales[:, 0]

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Blocks)
        self.values[rows].copy_(decoded.values)
        self.scales[rows].copy_(decoded.scales[:, 0])

    def stack(self, count: int) -> reference.Stack:
        values = self.values.view(count, -1, self.shape[1])
        return reference.Stack(values, self.scales.view(count, -1))

    @property
    def adds_deltas(self) -> bool:
        return triton_kernels_for(self.values.device) is not None

    def reads_rounded(self, num_tokens: int) -> bool:
        kernels = triton_kernels_for(self.values.device)
        return kernels is not None and kernels.reads_rounded(num_tokens, self.values)

    def rounded_product(self, x: Rows, epilogue: Epilogue) -> Rows:
        kernels = triton_kernels_for(self.values.device)
        assert kernels is not None, "its reader is on the same GPU"
        assert isinstance(x, torch.Tensor | reference.Rounded), "see fuses_norm"
        bias, activation, gated, _, _, factors = epilogue
        return kernels.rounded_fp8_product(
            x, self.values, self.scales, bias, activation, gated=gated, factors=factors
        )

    @staticmethod
    def choose_product(device: torch.device) -> ScaledProduct:
        kernels = triton_kernels_for(device)
        return reference.linear_scaled if kernels is None else kernels.fp8_product


def has_arithmetic(device: torch.device) -> bool:
    """Return True for a GPU that converts and multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY
