"""Linear layers with int8 weights on CPUs, with a scale for each row of the weight.

Products convert x to int8 too, with a scale for each token: one instruction (VNNI) multiplies four
elements and adds them up."""

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import cpu, reference

DTYPE = torch.int8


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if products with int8 weights cannot run."""
    problem = None
    if device.type != "cpu":
        problem = "is for CPUs; GPUs support --quantization fp8"
    elif not cpu.available():
        problem = f"needs the CPU kernels, and {cpu.problem()}"
    elif dtype == torch.float16:
        problem = "needs activations in float32 or bfloat16 (--dtype)"
    if problem:
        raise ConfigError(f"--quantization int8 {problem}.", param="quantization")


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (int8 [rows, columns], fp32 scales [rows]) of a weight in any type."""
    rows, scale = reference.quantize_int8(weight)
    return rows, scale[:, 0]
