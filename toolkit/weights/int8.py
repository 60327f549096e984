"""Int8 weights on CPUs, with a scale for each row.

Products convert x to int8 too, with a scale for each token: one instruction (VNNI) multiplies four
elements and adds them up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import cpu, reference
from toolkit.weights.packed import pack
from toolkit.weights.row_scaled import RowScaledWeight
from toolkit.weights.weight import Epilogue, Weight

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class Int8Weight(RowScaledWeight):
    values_dtype = torch.int8

    @staticmethod
    def require(device: torch.device, dtype: torch.dtype) -> None:
        problem = None
        if device.type != "cpu":
            problem = "is for CPUs; GPUs support --quantization fp8"
        elif not cpu.available():
            problem = f"needs the CPU kernels, and {cpu.problem()}"
        elif dtype == torch.float16:
            problem = "needs activations in float32 or bfloat16 (--dtype)"
        if problem:
            raise ConfigError(f"--quantization int8 {problem}.", param="quantization")

    @staticmethod
    def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, scales = reference.quantize_int8(weight)
        return values, scales[:, 0]

    def product(self, x: Rows, epilogue: Epilogue) -> torch.Tensor:
        assert isinstance(x, torch.Tensor), "see fuses_norm"
        bias, activation, gated, dtype, _ = epilogue
        y = reference.linear_int8(x, self.values, self.scales, bias, activation, gated)
        return y if dtype is None else y.to(dtype)

    def finish(self, epilogue: Epilogue) -> Weight:
        return pack(self.values.detach(), self.scales, epilogue, self.dtype) or self
