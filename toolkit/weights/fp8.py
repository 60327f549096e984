"""Linear layers with weights in FP8 (e4m3), a scale for each row of the weight.

Products of few rows are bound by reading the weight: they leave x in 16 bits, which costs nothing there and is more exact.
In products of many rows x is quantized too, with a scale for each token, for the tensor cores' FP8 rate.
"""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import reference

DTYPE = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)
"""Ada: the first GPUs with FP8 arithmetic."""
ALIGNMENT = 16
"""Both sizes of a weight must be multiples of it for `torch._scaled_mm`."""


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raises ConfigError where products with FP8 weights cannot run."""
    problem = None
    if not has_arithmetic(device):
        problem = "needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or later"
    elif _kernels(device) is None:
        problem = "needs the package triton"
    elif dtype not in (torch.bfloat16, torch.float16):
        problem = "needs activations in 16 bits: --dtype bfloat16 or float16"
    if problem:
        raise ConfigError(f"--quantization fp8 {problem}.", param="quantization")


def has_arithmetic(device: torch.device) -> bool:
    """Whether the device is a GPU that converts and multiplies FP8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(FP8 [rows, columns], fp32 scales [rows]) of a weight in any type."""
    rows, scale = reference.quantize_fp8(weight)
    return rows, scale[:, 0]


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    *,
    gated: bool = False,
) -> torch.Tensor:
    """act(x (W · scale)ᵀ + b), or act(gate) · up where W holds the rows of gate, then those of up.

    x: [num_tokens, in] in 16 bits; weight: FP8 [out, in]; scale: fp32 [out]; bias: [out].
    """
    kernels = _kernels(x.device)
    if kernels is None:
        plain: torch.Tensor = reference.linear_fp8(x, weight, scale, bias, activation, gated)
        return plain
    if len(x) <= kernels.TOKENS or not _aligned(weight):
        few: torch.Tensor = kernels.linear(x, weight, scale, bias, activation, gated)
        return few
    rows, x_scale = kernels.quantize(x)
    y = product(rows, x_scale, weight, scale, bias, x.dtype)
    if gated:
        y = kernels.gated_activation(y, activation)
    elif activation:
        y = kernels.activation(y, activation)
    return y


def product(
    x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(x · x_scale) (W · scale)ᵀ + b in `dtype`. x: FP8 [num_tokens, in]; x_scale: fp32 [num_tokens, 1]."""
    # Not every GPU's kernel can write fp16, or add a bias for every number of rows.
    y = torch._scaled_mm(
        x,
        weight.T,
        scale_a=x_scale,
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.to(dtype) if bias is None else torch.add(y, bias).to(dtype)


def _aligned(weight: torch.Tensor) -> bool:
    return not any(size % ALIGNMENT for size in weight.shape)


@cache
def _kernels(device: torch.device) -> SimpleNamespace | None:
    """The kernels for a device; None where plain PyTorch serves."""
    if device.type != "cuda":
        return None
    try:
        import triton  # noqa: F401
    except ImportError:
        return None
    from toolkit.kernels.triton.activation import activation, gated_activation
    from toolkit.kernels.triton.fp8 import TOKENS, linear, quantize

    return SimpleNamespace(
        TOKENS=TOKENS,
        activation=activation,
        gated_activation=gated_activation,
        linear=linear,
        quantize=quantize,
    )
