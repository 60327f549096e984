"""The layers of models. Activations are packed: [num_tokens, hidden], without a batch dimension."""

from toolkit.layers.embedding import Embedding, VocabularyEmbedding
from toolkit.layers.linear import GatedLinear, Linear, MergedLinear, OutputHead
from toolkit.layers.norm import LayerNorm, RMSNorm
from toolkit.layers.rotary import RotaryEmbedding

__all__ = [
    "Embedding",
    "GatedLinear",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "OutputHead",
    "RMSNorm",
    "RotaryEmbedding",
    "VocabularyEmbedding",
]
