"""The reference backend: plain PyTorch, on any device, slow."""

import torch

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    HeadTransform,
)
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
        return reference.qk_norm_rope_write(
            qkv,
            batch.slot_mapping,
            k_cache,
            v_cache,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            **transform.arguments(batch),
        )

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
            sinks=shape.sinks,
        )
