"""Scales for a KV cache in FP8: one for the keys and one for the values of each layer, taken into its weights.

e4m3 has its full precision from 2^-6 to 448, and less or nothing beyond. So keys are multiplied by a power of two, and queries divided by
it; likewise values, and the weights behind attention. That rounds nothing anew (but numbers at float16's ends), and costs steps
nothing. How large keys and values are is told from the weights, which are given inputs of a known size by the norm before them.
"""

from __future__ import annotations

import math

import torch

from toolkit.layers import Linear
from toolkit.models.decoder import Decoder, DecoderLayer

LARGEST = 16.0
"""About what the root mean square of the largest entry of a key or value becomes: it leaves a factor of 28 to e4m3's end, and of 1,000
to where its precision begins to fall.
"""
MOST = 8
"""Of the powers of two. Weights in float16 lose by greater ones."""


@torch.inference_mode()
def scale_cache(model: Decoder) -> None:
    """After loading, and before weights are packed."""
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
        factor = _factor(_sizes(layer, keys).max())
        _multiply(layer.qkv, keys, factor)
        _multiply(layer.qkv, queries, 1 / factor)
    factor = _factor(_sizes(layer, values).max())
    _multiply(layer.qkv, values, factor)
    _multiply(layer.out, slice(None), 1 / factor, bias=False)


def _sizes(layer: DecoderLayer, rows: slice) -> torch.Tensor:
    """The root mean square of each of these outputs of `qkv`, as if what the norm gives it were independent."""
    norm, linear = layer.attn_norm, layer.qkv
    weight = linear.weight[rows].float()
    if linear.scale is not None:
        weight *= linear.scale[rows, None]
    square = (weight * norm.weight.float()).square().sum(1)
    constant = torch.zeros_like(square) if linear.bias is None else linear.bias[rows].float()
    if norm.bias is not None:
        constant = constant + weight @ norm.bias.float()
    return (square + constant.square()).sqrt()


def _factor(size: torch.Tensor) -> float:
    """What brings it near LARGEST."""
    largest = float(size)
    if not 0 < largest < math.inf:
        return 1.0
    return 2.0 ** max(-MOST, min(MOST, round(math.log2(LARGEST / largest))))


def _multiply(linear: Linear, rows: slice, factor: float, *, bias: bool = True) -> None:
    (linear.weight if linear.scale is None else linear.scale)[rows].mul_(factor)
    if bias and linear.bias is not None:
        linear.bias[rows].mul_(factor)
