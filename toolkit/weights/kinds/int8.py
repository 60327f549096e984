"""Int8 weights on CPUs, with a scale for each row.

Products convert x to int8 too, with a scale for each token: one instruction (VNNI) multiplies four
elements and adds them up."""

from __future__ import annotations

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import cpu, reference
from toolkit.weights.groups import Decoded, Groups
from toolkit.weights.kinds.packed import pack
from toolkit.weights.kinds.row_scaled import RowScaledWeight, ScaledProduct
from toolkit.weights.weight import Epilogue, Weight


class Int8Weight(RowScaledWeight):
    BYTES = 1.0
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

    def write(self, rows: slice, decoded: Decoded) -> None:
        assert isinstance(decoded, Groups)
        self.values[rows].copy_(decoded.values.short() - 128)
        self.scales[rows].copy_(decoded.scales[:, 0])

    @staticmethod
    def choose_product(device: torch.device) -> ScaledProduct:
        return reference.linear_int8

    def finish(self, epilogue: Epilogue) -> Weight:
        return pack(self.values.detach(), self.scales, epilogue, self.dtype) or self
