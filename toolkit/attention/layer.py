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


class SharedAttention(nn.Module):
    """Causal attention over the cache of another layer. It has queries alone."""

    def __init__(self, shape: AttentionShape, transform: HeadTransform) -> None:
        super().__init__()
        self.shape, self.transform = shape, transform
        self._sources: list[Attention] = []  # one, in a list, so that it is no submodule

    def read(self, source: Attention) -> None:
        """Set the layer whose cache it reads, before the first step."""
        self._sources = [source]

    @property
    def source(self) -> Attention:
        return self._sources[0]

    @property
    def backend(self) -> AttentionBackend:
        return self.source.backend

    @property
    def group(self) -> int:
        return self.source.group

    @property
    def k_cache(self) -> torch.Tensor:
        return self.source.k_cache

    @property
    def v_cache(self) -> torch.Tensor:
        return self.source.v_cache

    def forward(self, query: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return attention [num_tokens, num_heads · head_size] of the step's tokens, in the cache.

        query: [num_tokens, num_heads · head_size]."""
        return self.backend.read(self, query, batch).flatten(1)
