"""The attention layer of a model: holds its part of the KV cache and calls the backend."""

from __future__ import annotations

import torch
from torch import nn

from toolkit.attention.backend import AttentionBackend, AttentionBatch, AttentionShape


class Attention(nn.Module):
    """Causal attention over the cache. The runner gives it a backend and its cache before the first step."""

    backend: AttentionBackend
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self.shape = shape

    def bind(self, backend: AttentionBackend, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """Caches: [num_blocks, block_size, num_kv_heads, head_size]."""
        self.backend, self.k_cache, self.v_cache = backend, k_cache, v_cache

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """query: [num_tokens, num_heads, head_size], key and value: [num_tokens, num_kv_heads, head_size] of
        this step.

        Returns [num_tokens, num_heads · head_size].
        """
        self.backend.write(key, value, self.k_cache, self.v_cache, batch)
        return self.backend.attend(query, self.k_cache, self.v_cache, batch, self.shape).flatten(1)
