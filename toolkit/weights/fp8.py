"""Linear layers with FP8 weights (e4m3), with a scale for each row of the weight.

Products of few rows are bound by reading the weight: they leave x in 16 bits, which costs nothing
and is more exact. In products of many rows x is quantized too, with a scale for each token, for the
FP8 rate of the tensor cores."""

import torch

from toolkit.errors import ConfigError
from toolkit.kernels import reference
from toolkit.kernels.table import kernels_for

DTYPE = torch.float8_e4m3fn
MIN_CAPABILITY = (8, 9)  # ada, the first GPUs with FP8 arithmetic
ALIGNMENT = 16  # divisor of both sizes of a weight for `torch._scaled_mm`


def require(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ConfigError if products with FP8 weights cannot run."""
    problem = None
    if not has_arithmetic(device):
        problem = "needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or later"
    elif kernels_for(device) is None:
        problem = "needs the package triton"
    elif dtype not in (torch.bfloat16, torch.float16):
        problem = "needs activations in 16 bits: --dtype bfloat16 or float16"
    if problem:
        raise ConfigError(f"--quantization fp8 {problem}.", param="quantization")


def has_arithmetic(device: torch.device) -> bool:
    """Return True for a GPU that converts and multiplies FP8."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (FP8 [rows, columns], fp32 scales [rows]) of a weight in any type."""
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
    """Return act(x (W · scale)ᵀ + b), or act(gate) · up if W holds gate's rows, then up's.

    x: [num_tokens, in] in 16 bits; weight: FP8 [out, in]; scale: fp32 [out]; bias: [out]."""
    kernels = kernels_for(x.device)
    if kernels is None:
        return reference.linear_fp8(x, weight, scale, bias, activation, gated)
    if len(x) <= kernels.max_fp8_linear_tokens or not _is_aligned(weight):
        return kernels.fp8_linear(x, weight, scale, bias, activation, gated)
    rows, x_scale = kernels.quantize_fp8(x)
    y = product(rows, x_scale, weight, scale, bias, x.dtype)
    if gated:
        assert activation is not None
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
    """Return (x · x_scale) (W · scale)ᵀ + b in `dtype`.

    x: FP8 [num_tokens, in]; x_scale: fp32 [num_tokens, 1]."""
    # Some GPUs' kernels cannot write fp16, or add a bias for some numbers of rows.
    y = torch._scaled_mm(
        x,
        weight.T,
        scale_a=x_scale,
        scale_b=scale[None],
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return y.to(dtype) if bias is None else torch.add(y, bias).to(dtype)


def _is_aligned(weight: torch.Tensor) -> bool:
    return not any(size % ALIGNMENT for size in weight.shape)
