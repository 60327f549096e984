"""The pieces models are made of. Activations are packed: [num_tokens, hidden], without a batch dimension."""

from toolkit.layers.embedding import Embedding
from toolkit.layers.linear import Linear, MergedLinear
from toolkit.layers.mlp import activation
from toolkit.layers.norm import LayerNorm, RMSNorm
from toolkit.layers.rotary import RotaryEmbedding
from toolkit.layers.weights import Slot, Slots

__all__ = [
    "Embedding",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "Slot",
    "Slots",
    "activation",
]
