"""Attention of a decoder to the rows of a feature, such as a clip."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from toolkit.attention import AttentionBatch, AttentionShape
from toolkit.distributed import even_shard
from toolkit.layers import Linear, MergedLinear
from toolkit.models import describe
from toolkit.models.memory import TokenMemory
from toolkit.models.mix import Mix
from toolkit.models.model import PagedAttention

if TYPE_CHECKING:
    from toolkit.weights.weight import Rows


class FeatureAttention(PagedAttention):
    """Attention whose keys and values are those of a feature, which all tokens see."""

    def __init__(self, shape: AttentionShape, num_rows: int) -> None:
        super().__init__(shape)
        self.memory = TokenMemory.of_keys(shape.num_kv_heads, shape.head_size, feature=num_rows)

    def forward(self, query: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return attention [num_tokens, num_heads · head_size] of queries of the same shape."""
        assert batch.feature is not None, "the decoder has an encoder"
        return self.backend.read(self, query, batch.feature).flatten(1)


class CrossAttentionMix(Mix):
    """Cross-attention. Keys and values of a feature are one product."""

    input: Linear
    output: Linear
    keeps_queries: bool = False
    """Set for steps whose queries are read after them. They have no graph."""
    queries: torch.Tensor  # [num_tokens, heads, head_size] of the last such step

    def __init__(self, attention: describe.CrossAttention, hidden: int, _: object) -> None:
        super().__init__()
        size, bias = attention.head_size, attention.bias
        self.heads = even_shard(attention.num_heads, "attention heads")
        heads, shard = self.heads, self.heads.times(size)
        self.input = MergedLinear(hidden, [shard], [attention.q], bias=bias)
        self.kv = MergedLinear(hidden, [shard] * 2, [attention.k, attention.v], bias=bias)
        shape = AttentionShape(heads.count, heads.count, size, attention.scale)
        self.attn = FeatureAttention(shape, attention.feature)
        self.output = Linear(
            attention.width, hidden, attention.out, bias=attention.out_bias, split="in"
        )

    def forward(self, x: Rows, batch: AttentionBatch) -> torch.Tensor:
        """Return the input of `output`, [num_tokens, heads · head_size]."""
        query: torch.Tensor = self.input(x)
        if self.keeps_queries:
            self.queries = query.view(len(query), self.heads.count, -1).clone()
        out: torch.Tensor = self.attn(query, batch)
        return out

    def keep(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Cache keys and values of a feature's rows [n, hidden] in slots [n]; negative: none."""
        self.attn.backend.store(self.attn, self.kv(rows), slots)
