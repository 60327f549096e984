"""Products with weights on a GPU. The size of a product decides which kernels compute it.

`factors` are the LoRA adapters of a weight, in steps where some tokens have one. What they add to
the product comes before activation and gate."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.kernels import cublas, reference
from toolkit.kernels.reference import Rounded
from toolkit.kernels.triton.activation import activation as activated
from toolkit.kernels.triton.activation import gated_activation
from toolkit.kernels.triton.products import fp8, fp8_matmul, grouped, grouped_layout, linear, lora
from toolkit.kernels.triton.products.epilogue import Delta
from toolkit.kernels.triton.products.lora import Factors
from toolkit.kernels.triton.products.matmul import Unscaled

MORE_ROW_CLASSES = fp8_matmul.ROW_CLASSES
"""Numbers of rows above `matmul.ROW_CLASSES` for which `grouped` and `fp8_matmul` have kernels of
their own."""
GROUPED_TOKENS = 256
"""Rows of x up to which products of grouped weights are one kernel."""
LIBRARY_TOKENS = 512
"""Rows of x from which cuBLAS multiplies FP8 weights in blocks, if it can."""
ALIGNMENT = 16  # divisor of both sizes of an FP8 weight for `torch._scaled_mm`


def product(
    x: Tensor | Unscaled,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Return act(x Wᵀ + b), or act(gate) * up if W holds gate's rows, then up's.

    x: `[num_tokens, in]`, contiguous, or a result of `linear.add_norm`; weight: `[size, in]`,
    gated: `[2 * size, in]`; bias: one per row of the weight. Returns `[num_tokens, size]`, which is
    `out` if that is given.

    NOTE: on Hopper the weight may be read before the kernel ahead ends. See `linear.linear`."""
    if isinstance(x, Unscaled) or linear.fits(len(x), weight):
        delta = _shrink(x, factors)
        return linear.linear(x, weight, bias, activation, gated, out, delta)
    if factors is not None:
        y = torch.addmm(lora.delta(x, factors), x, weight.T)
        return _finish(y, bias, activation, gated, out)
    if activation == "gelu_tanh" and not gated and bias is not None and x.dtype != torch.float32:
        # cuBLAS adds the bias and applies this form of GELU while the sums are in registers.
        return torch._addmm_activation(bias, x, weight.T, use_gelu=True, out=out)
    if activation is None:
        return cublas.linear(x, weight, bias, out)
    return _activate(cublas.linear(x, weight, bias), activation, gated, out)


def fuses_norm(num_tokens: int, weight: Tensor) -> bool:
    """Return True if an RMS norm is fused into products of `num_tokens` rows with this weight.

    It is fused into the product before it (`linear.add_norm`) and into `product` after it. Not in
    float16, where rows may overflow before they are scaled, nor with FP8 weights, where it is
    slower."""
    return num_tokens > 1 and weight.dtype == torch.bfloat16 and linear.fits(num_tokens, weight)


def add_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    square_sums: Tensor,
    bias: Tensor | None = None,
    factors: Factors | None = None,
) -> Unscaled:
    """Compute `linear.add_norm`."""
    delta = _shrink(x, factors)
    return linear.add_norm(x, weight, residual, norm_weight, eps, square_sums, bias, delta)


def add_delta(
    y: Tensor, x: Tensor, factors: Factors, activation: str | None = None, *, gated: bool = False
) -> Tensor:
    """Return act(y + what the adapters of x add), or act(gate) * up. y: a product with its bias."""
    return _finish(y + lora.delta(x.contiguous(), factors), None, activation, gated)


def reads_rounded(num_tokens: int, weight: Tensor) -> bool:
    """Return True if `fp8_product` of `num_tokens` rows rounds them with one scale each."""
    return num_tokens > linear.MAX_TOKENS and _is_aligned(weight)


def fp8_product(
    x: Tensor | Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    gated: bool = False,
    factors: Factors | None = None,
) -> Tensor:
    """Return `product` with the weight W * scale. weight: FP8; scale: fp32, one per row.

    Products of few rows are bound by reading the weight: they leave x in 16 bits, which costs
    nothing and is more exact. For more rows x is quantized too, with a scale for each token, and
    for each 128 columns in our own kernel, for the FP8 rate of the tensor cores. `Rounded` rows
    are for products that `reads_rounded`, without factors."""
    if isinstance(x, Rounded) or reads_rounded(len(x), weight):
        y = _row_scaled_product(x, weight, scale, bias, factors)
        return _finish(y, None, activation, gated)
    if len(x) <= fp8.TOKENS or not _is_aligned(weight):
        delta = _shrink(x, factors)
        return fp8.linear(x, weight, scale, bias, activation, gated, delta=delta)
    return _block_scaled_product(x, weight, scale, bias, activation, gated, None, factors)


def rounded_fp8_product(
    x: Tensor | Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    gated: bool = False,
    factors: Factors | None = None,
) -> Tensor | Rounded:
    """Return `fp8_product` for a product that `reads_rounded`.

    The kernel of the activation rounds its result, if x has many rows."""
    size = weight.shape[0] // 2 if gated else weight.shape[0]
    if size > fp8.MAX_SIZE or not (isinstance(x, Rounded) or reads_rounded(len(x), weight)):
        return fp8_product(x, weight, scale, bias, activation, gated=gated, factors=factors)
    y = _row_scaled_product(x, weight, scale, bias, factors)
    return Rounded(*fp8.quantize(y, activation, gated), y.dtype)


def _is_aligned(weight: Tensor) -> bool:
    return all(size % ALIGNMENT == 0 for size in weight.shape)


def _row_scaled_product(
    x: Tensor | Rounded,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    factors: Factors | None,
) -> Tensor:
    """Return x (W * scale)ᵀ + b and what the adapters add. x is rounded if it is not yet."""
    rows = x if isinstance(x, Rounded) else Rounded(*fp8.quantize(x), x.dtype)
    y = scaled_product(rows.values, rows.scales, weight, scale, bias, rows.dtype)
    if factors is not None:
        assert isinstance(x, Tensor), "adapters multiply rows in 16 bits"
        y += lora.delta(x, factors)
    return y


def _block_scaled_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    activation: str | None,
    gated: bool,
    out: Tensor | None,
    factors: Factors | None,
) -> Tensor:
    """Return `product` of x with a scale for each token and 128 columns, in our own kernel."""
    if out is None:
        size = weight.shape[0] // 2 if gated else weight.shape[0]
        out = torch.empty((len(x), size), dtype=x.dtype, device=x.device)
    rows, row_scales = fp8_matmul.quantize(x)
    # `shrink` is the last kernel before the product, which reads x when that releases it.
    delta = _shrink(x, factors)
    return fp8_matmul.linear(
        rows, row_scales, weight, scale, bias, activation, gated, out, delta=delta
    )


def scaled_product(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return (x * x_scale) (W * scale)ᵀ + b in `dtype`.

    x: FP8 `[num_tokens, in]`; x_scale: fp32 `[num_tokens, 1]`."""
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


def fp8_block_product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    factors: Factors | None = None,
) -> Tensor:
    """Return `fp8_product` with scales of blocks, fp32 `[blocks of rows, blocks of columns]`.

    For many rows x has a scale for each token and block of columns. Raises ValueError if `up`
    begins inside a block."""
    if len(x) <= fp8.TOKENS or weight.shape[1] % ALIGNMENT:
        return fp8.linear(x, weight, scale, bias, activation, gated, out, _shrink(x, factors))
    if len(x) >= LIBRARY_TOKENS and _library_multiplies_blocks(x.device, weight.shape):
        missing = -len(x) % 4  # it multiplies a multiple of 4 rows
        padded = functional.pad(x, (0, 0, 0, missing)) if missing else x
        rows, row_scales = fp8_matmul.quantize(padded)
        y = torch._scaled_mm(
            rows, weight.T, scale_a=row_scales, scale_b=scale.T, out_dtype=torch.bfloat16
        )[: len(x)].to(x.dtype)
        if factors is not None:
            y += lora.delta(x, factors)
        return _finish(y, bias, activation, gated, out)
    return _block_scaled_product(x, weight, scale, bias, activation, gated, out, factors)


def _library_multiplies_blocks(device: torch.device, shape: torch.Size) -> bool:
    """Return True if cuBLAS has products with scales of blocks.

    Its scales of a row of blocks are a multiple of 4."""
    rows, columns = shape
    is_aligned = rows % ALIGNMENT == 0 and columns % (4 * reference.FP8_BLOCK) == 0
    return is_aligned and _has_block_products(device)


@cache
def _has_block_products(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    return tuple(map(int, (torch.version.cuda or "0").split("."))) >= (12, 9)


def grouped_product(
    x: Tensor | Unscaled,
    weight: grouped_layout.Grouped,
    bias: Tensor | None = None,
    activation: str | None = None,
    gated: bool = False,
    out: Tensor | None = None,
    factors: Factors | None = None,
    expanded: Tensor | None = None,
) -> Tensor:
    """Return `product` with a weight that has a scale for each group of columns.

    Many rows are for cuBLAS: with `expanded`, the weight in the type of x, or one of this call."""
    most = GROUPED_TOKENS if expanded is None else most_grouped_tokens(weight.values.device)
    if isinstance(x, Unscaled) or len(x) <= most:
        delta = _shrink(x, factors)
        return grouped.linear(x, weight, bias, activation, gated, out, delta=delta)
    dense = grouped_layout.expand(weight, x.dtype) if expanded is None else expanded
    return product(x, dense, bias, activation, gated=gated, out=out, factors=factors)


@cache
def most_grouped_tokens(device: torch.device) -> int:
    """Return the most rows of x that are multiplied by integers, of a weight kept expanded, too.

    With more, cuBLAS is faster on an H200. Nothing was measured on GPUs other than Hopper, which
    read fewer bytes for each operation: they only save the expansion."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return grouped.TOKENS if is_hopper else GROUPED_TOKENS


def grouped_add_norm(
    x: Tensor,
    weight: grouped_layout.Grouped,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    square_sums: Tensor,
    bias: Tensor | None = None,
    factors: Factors | None = None,
) -> Unscaled:
    """Compute `grouped.add_norm`."""
    delta = _shrink(x, factors)
    return grouped.add_norm(x, weight, residual, norm_weight, eps, square_sums, bias, delta=delta)


def fuses_grouped_norm(num_tokens: int) -> bool:
    """Return True if an RMS norm is fused into `grouped_product`s of so many rows."""
    return num_tokens <= linear.MAX_TOKENS


def _shrink(x: Tensor | Unscaled, factors: Factors | None) -> Delta | None:
    if factors is None:
        return None
    rows = x.x if isinstance(x, Unscaled) else x
    return lora.shrink(rows, factors)


def _finish(
    y: Tensor, bias: Tensor | None, kind: str | None, gated: bool, out: Tensor | None = None
) -> Tensor:
    if bias is not None:
        y += bias
    if kind is not None:
        return _activate(y, kind, gated, out)
    return y if out is None else out.copy_(y)


def _activate(y: Tensor, kind: str, gated: bool, out: Tensor | None = None) -> Tensor:
    return gated_activation(y, kind, out) if gated else activated(y, kind, out)
