"""Scales for an FP8 KV cache: one for the keys and one for the values of each layer.

e4m3 has full precision from 2^-6 to 448, and less or none outside. So keys are multiplied by a
power of two and queries divided by it; values, and the output projection, in the same way. The
scales are folded into the weights: this adds no rounding (except near the ends of float16's range)
and no work per step. The size of keys and values is computed from the weights, since a norm gives
their inputs a known size: the norm before attention or, without one, the norms of all products
that were added to the residual stream before."""

import math

import torch

from toolkit.attention import Attention, SharedAttention
from toolkit.kernels.reference import Norm
from toolkit.layers import Linear
from toolkit.models.decoder import Decoder, Step
from toolkit.models.mix import AttentionMix

TARGET_RMS = 16.0
"""Approximate RMS of the largest entry of a key or value after scaling. It leaves a factor of 28
to e4m3's maximum, and of 1,000 to where precision starts to drop."""
SAMPLE = 4096  # tokens whose embeddings are read
MAX_EXPONENT = 30
MAX_EXPONENT_FLOAT16 = 8  # larger powers of two cost precision in such weights


@torch.inference_mode()
def scale_cache(model: Decoder) -> None:
    """Fold the scales into the weights. Call after loading, before packing."""
    square = _embedding_square(model)
    factors: dict[Attention, tuple[float, float]] = {}
    for step in (module for module in model.modules() if isinstance(module, Step)):
        post, factor = step.join.post, step.join.factor
        if post is not None:
            square = square + (step.join.scale * post.weight.float()).square()
        if factor is not None:
            square = square * factor.float().square()
        norms = step.join.arguments or (Norm(square.sqrt(), None, 0.0, False),)
        for index, mix in zip(step.inputs, step.mixes, strict=True):
            if not isinstance(mix, AttentionMix) or mix.attn.transform.clip:
                continue
            if isinstance(mix.attn, SharedAttention):
                _adapt(mix, *factors[mix.attn.source])
            else:
                factors[mix.attn] = _scale(mix, norms[index], model.dtype)


def _embedding_square(model: Decoder) -> torch.Tensor:
    """Return the mean square of each entry of the first layer's input.

    0 if another stage has the embedding: values of this stage's first layer are then not scaled."""
    if not model.stage.is_first:
        return torch.zeros(())
    rows = model.embed.weight.dequantize(slice(min(SAMPLE, model.embed.size)))
    return (model.description.embed_scale * rows).square().mean(0)


def _scale(mix: AttentionMix, norm: Norm, dtype: torch.dtype) -> tuple[float, float]:
    """Scale keys and values. Return their factors."""
    num_q, num_k, num_v = (part.count for part in mix.input.parts[:3])
    before = num_q + num_k
    keys, values = slice(num_q, before), slice(before, before + num_v)
    if mix.norm is not None and mix.norm.k_weight is not None:
        key_factor = _factor(mix.norm.k_weight.float().abs().max(), dtype)
        mix.norm.k_weight.mul_(key_factor)
    else:
        key_factor = _factor(_output_rms(mix.input, norm, keys).max(), dtype)
        _multiply(mix.input, keys, key_factor)
    value_factor = 1.0  # of normed values, whose RMS is 1
    if mix.norm is None or not mix.norm.norm.norms_values:
        value_factor = _factor(_output_rms(mix.input, norm, values).max(), dtype)
        _multiply(mix.input, values, value_factor)
    _adapt(mix, key_factor, value_factor)
    return key_factor, value_factor


def _adapt(mix: AttentionMix, key_factor: float, value_factor: float) -> None:
    """Undo the factors of keys in queries, and of values in the output projection."""
    if mix.norm is not None:
        mix.norm.q_weight.div_(key_factor)
    else:
        _multiply(mix.input, slice(mix.input.parts[0].count), 1 / key_factor)
    _multiply(mix.output, slice(None), 1 / value_factor, bias=False)


def _output_rms(linear: Linear, norm: Norm, rows: slice) -> torch.Tensor:
    """Return the RMS of each of these outputs, assuming independent normalized inputs."""
    weight = linear.weight.dequantize(rows)
    square = (weight * norm.weight.float()).square().sum(1)
    constant = torch.zeros_like(square) if linear.bias is None else linear.bias[rows].float()
    if norm.bias is not None:
        constant = constant + weight @ norm.bias.float()
    return (square + constant.square()).sqrt()


def _factor(rms: torch.Tensor, dtype: torch.dtype) -> float:
    """Return the power of two that brings `rms` near TARGET_RMS. `dtype`: of the weights."""
    value = float(rms)
    if not 0 < value < math.inf:
        return 1.0
    most = MAX_EXPONENT_FLOAT16 if dtype == torch.float16 else MAX_EXPONENT
    return 2.0 ** max(-most, min(most, round(math.log2(TARGET_RMS / value))))


def _multiply(linear: Linear, rows: slice, factor: float, *, bias: bool = True) -> None:
    linear.weight.multiply(factor, rows)
    if bias and linear.bias is not None:
        linear.bias[rows].mul_(factor)
