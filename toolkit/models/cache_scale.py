"""Scales for an FP8 KV cache: one for the keys and one for the values of each layer.

e4m3 has full precision from 2^-6 to 448, and less or none outside. So keys are multiplied by a
power of two and queries divided by it; values, and the output projection, in the same way. The
scales are folded into the weights: this adds no rounding (except near the ends of float16's range)
and no work per step. The size of keys and values is computed from the weights, since the norm
before them gives inputs of a known size."""

import math

import torch

from toolkit.layers import Linear
from toolkit.models.decoder import Decoder, DecoderLayer

TARGET_RMS = 16.0
"""Approximate RMS of the largest entry of a key or value after scaling. It leaves a factor of 28
to e4m3's maximum, and of 1,000 to where precision starts to drop."""
MAX_EXPONENT = 8  # larger powers of two cost precision in float16 weights


@torch.inference_mode()
def scale_cache(model: Decoder) -> None:
    """Fold the scales into the weights. Call after loading, before packing."""
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        _scale(layer)


def _scale(layer: DecoderLayer) -> None:
    num_q, num_k, _ = (part.count for part in layer.qkv.parts)
    queries, keys, values = slice(num_q), slice(num_q, num_q + num_k), slice(num_q + num_k, None)
    transform = layer.attn.transform
    if transform.q_weight is not None and transform.k_weight is not None:
        factor = _factor(transform.k_weight.float().abs().max())
        transform.k_weight.mul_(factor)
        transform.q_weight.div_(factor)
    else:
        factor = _factor(_output_rms(layer, keys).max())
        _multiply(layer.qkv, keys, factor)
        _multiply(layer.qkv, queries, 1 / factor)
    factor = _factor(_output_rms(layer, values).max())
    _multiply(layer.qkv, values, factor)
    _multiply(layer.out, slice(None), 1 / factor, bias=False)


def _output_rms(layer: DecoderLayer, rows: slice) -> torch.Tensor:
    """Return the RMS of each of these outputs of `qkv`, assuming independent normalized inputs."""
    norm, linear = layer.attn_norm, layer.qkv
    weight = linear.weight[rows].float()
    if linear.scale is not None:
        weight *= linear.scale[rows, None]
    square = (weight * norm.weight.float()).square().sum(1)
    constant = torch.zeros_like(square) if linear.bias is None else linear.bias[rows].float()
    if norm.bias is not None:
        constant = constant + weight @ norm.bias.float()
    return (square + constant.square()).sqrt()


def _factor(rms: torch.Tensor) -> float:
    """Return the power of two that brings `rms` near TARGET_RMS."""
    value = float(rms)
    if not 0 < value < math.inf:
        return 1.0
    return 2.0 ** max(-MAX_EXPONENT, min(MAX_EXPONENT, round(math.log2(TARGET_RMS / value))))


def _multiply(linear: Linear, rows: slice, factor: float, *, bias: bool = True) -> None:
    (linear.weight if linear.scale is None else linear.scale)[rows].mul_(factor)
    if bias and linear.bias is not None:
        linear.bias[rows].mul_(factor)
