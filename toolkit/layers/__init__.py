"""The pieces models are made of. Activations are packed: [num_tokens, hidden], without a batch dimension."""

from toolkit.layers.activation import activation_kind
from toolkit.layers.embedding import Embedding, VocabularyEmbedding
from toolkit.layers.linear import GatedLinear, Linear, MergedLinear, OutputHead
from toolkit.layers.norm import LayerNorm, RMSNorm
from toolkit.layers.rotary import RotaryEmbedding
from toolkit.layers.weights import QuantizedSlot, Slot, Slots, plain_slots

__all__ = [
    "Embedding",
    "GatedLinear",
    "LayerNorm",
    "Linear",
    "MergedLinear",
    "OutputHead",
    "QuantizedSlot",
    "RMSNorm",
    "RotaryEmbedding",
    "Slot",
    "Slots",
    "VocabularyEmbedding",
    "activation_kind",
    "plain_slots",
]
