"""The GPU backend: our Triton kernels."""

from __future__ import annotations

import torch

from toolkit.attention.backend import (
    AttentionBackend,
    AttentionBatch,
    AttentionShape,
    HeadTransform,
)


class TritonBackend(AttentionBackend):
    name = "triton"
    capturable = True

    def __init__(self) -> None:
        from toolkit.kernels.triton.attention import decode_attention, paged_attention
        from toolkit.kernels.triton.rotary import qk_norm_rope_write

        self._write, self._attend, self._decode = (
            qk_norm_rope_write,
            paged_attention,
            decode_attention,
        )

    @classmethod
    def unfit(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "the package triton is not installed"
        if head_size > 256:
            return f"takes head sizes up to 256, and the model's is {head_size}"
        return None

    def forward(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        transform: HeadTransform,
    ) -> torch.Tensor:
        """In one kernel for many requests of a single token each."""
        if batch.max_query_len > 1:
            return super().forward(qkv, k_cache, v_cache, batch, shape, transform)
        out: torch.Tensor = self._decode(
            qkv,
            k_cache,
            v_cache,
            batch.positions,
            batch.slot_mapping,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            rows=batch.rows,
            order=batch.order,
            num_heads=shape.num_heads,
            max_seq_len=batch.max_seq_len,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
            cos_sin=transform.cos_sin,
            q_weight=transform.q_weight,
            k_weight=transform.k_weight,
            eps=transform.eps,
        )
        return out

    def write(
        self,
        qkv: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
        transform: HeadTransform,
    ) -> torch.Tensor:
        query: torch.Tensor = self._write(
            qkv,
            batch.positions,
            transform.cos_sin,
            batch.slot_mapping,
            k_cache,
            v_cache,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            q_weight=transform.q_weight,
            k_weight=transform.k_weight,
            eps=transform.eps,
        )
        return query

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        out: torch.Tensor = self._attend(
            query,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            rows=batch.rows,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )
        return out
