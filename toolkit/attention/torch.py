"""The reference backend: plain PyTorch, any device, no speed."""

from __future__ import annotations

import torch

from toolkit.attention.backend import AttentionBackend, AttentionBatch, AttentionShape
from toolkit.kernels import reference


class TorchBackend(AttentionBackend):
    name = "torch"

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int) -> str | None:
        return None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        reference.write_kv(key, value, k_cache, v_cache, batch.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        out: torch.Tensor = reference.paged_attention(
            query,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )
        return out
