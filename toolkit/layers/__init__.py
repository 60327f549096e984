"""The layers of models. Activations are packed: [num_tokens, hidden], without a batch dimension."""

from toolkit.layers.embedding import Embedding, VocabularyEmbedding
from toolkit.layers.experts import Experts, ListedExperts, Projections, Router, StackedExperts
from toolkit.layers.linear import GatedLinear, Linear, MergedLinear, OutputHead
from toolkit.layers.norm import Join, Norm
from toolkit.layers.stream import Stream

__all__ = [
    "Embedding",
    "Experts",
    "GatedLinear",
    "Join",
    "Linear",
    "ListedExperts",
    "MergedLinear",
    "Norm",
    "OutputHead",
    "Projections",
    "Router",
    "StackedExperts",
    "Stream",
    "VocabularyEmbedding",
]
