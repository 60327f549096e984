"""Attention over the paged KV cache: one interface, and a backend chosen at start-up."""

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    Backends,
    FeatureRows,
    GroupTable,
    HeadTransform,
    StateRows,
    choose_backend,
)
from toolkit.attention.layer import Attention, SharedAttention
from toolkit.kernels.reference import HeadNorm

__all__ = [
    "Attention",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionShape",
    "Backends",
    "FeatureRows",
    "GroupTable",
    "HeadNorm",
    "HeadTransform",
    "SharedAttention",
    "StateRows",
    "choose_backend",
]
