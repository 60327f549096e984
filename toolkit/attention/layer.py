"""The attention layer of a model: it holds its part of the KV cache and calls the backend."""

import torch
from torch import nn

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    HeadTransform,
)


class Attention(nn.Module):
    """Causal attention over the cache. The runner calls `bind` and sets `backend` first."""

    backend: AttentionBackend
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    group: int = 0  # index into `AttentionBatch.tables`

    def __init__(self, shape: AttentionShape, transform: HeadTransform) -> None:
        super().__init__()
        self.shape = shape
        self.transform = transform

    def bind(self, *tensors: torch.Tensor) -> None:
        """`tensors`: keys and values, [num_blocks, block_size, num_kv_heads, head_size] each."""
        self.k_cache, self.v_cache = tensors

    def forward(self, qkv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return attention [num_tokens, num_heads · head_size] of the step's tokens.

        qkv: [num_tokens, (num_heads + 2 · num_kv_heads) · head_size]."""
        return self.backend.forward(self, qkv, batch).flatten(1)
