"""The reference backend: plain PyTorch, on any device, slow."""

import torch

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    HeadTransform,
)
from toolkit.attention.heads import split_heads
from toolkit.kernels import reference


class TorchBackend(AttentionBackend):
    name = "torch"

    @classmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        return None

    def write(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        transform: HeadTransform,
    ) -> torch.Tensor:
        query, key, value = split_heads(qkv, batch, shape, transform)
        reference.write_kv(key, value, k_cache, v_cache, batch.slot_mapping)
        return query

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        return reference.paged_attention(
            query,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table[batch.rows],
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )
