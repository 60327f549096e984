"""The reference backend: plain PyTorch, on any device, slow."""

import torch

from toolkit.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer
from toolkit.kernels import reference


class TorchBackend(AttentionBackend):
    name = "torch"

    @classmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        return None

    def write(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return _transform(layer, qkv, batch, layer.shape.num_kv_heads)

    def turn(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return _transform(layer, query, batch, 0)

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return reference.paged_attention(
            query,
            layer.k_cache,
            layer.v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.tables[layer.group].blocks[batch.rows],
            scale=layer.shape.scale,
            sliding_window=layer.shape.sliding_window,
            chunk=layer.shape.chunk,
            soft_cap=layer.shape.soft_cap,
            sinks=layer.shape.sinks,
            last_key=batch.last_key,
        )


def _transform(
    layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch, num_kv_heads: int
) -> torch.Tensor:
    return reference.qk_norm_rope_write(
        qkv,
        batch.tables[layer.group].slots,
        layer.k_cache,
        layer.v_cache,
        num_heads=layer.shape.num_heads,
        num_kv_heads=num_kv_heads,
        **layer.transform.arguments(batch),
    )
