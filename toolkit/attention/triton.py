"""The GPU backend: our Triton kernels."""

from __future__ import annotations

import torch

from toolkit.attention.backend import AttentionBackend, AttentionBatch, AttentionShape


class TritonBackend(AttentionBackend):
    name = "triton"

    def __init__(self) -> None:
        from toolkit.kernels.triton import attention

        self._kernels = attention

    @classmethod
    def unfit(cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            import triton  # noqa: F401
        except ImportError:
            return "the package triton is not installed"
        if head_size > 256:
            return f"takes head sizes up to 256, and the model's is {head_size}"
        return None

    def write(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        self._kernels.write_kv(key, value, k_cache, v_cache, batch.slot_mapping)

    def attend(
        self,
        query: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        batch: AttentionBatch,
        shape: AttentionShape,
    ) -> torch.Tensor:
        out: torch.Tensor = self._kernels.paged_attention(
            query,
            k_cache,
            v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=shape.scale,
            sliding_window=shape.sliding_window,
            soft_cap=shape.soft_cap,
        )
        return out
