"""The GPU backend: Triton kernels."""

import torch

from toolkit.attention.backend import AttentionBackend, AttentionBatch, AttentionLayer
from toolkit.kernels.table import triton_kernels_for


class TritonBackend(AttentionBackend):
    name = "triton"
    is_capturable = takes_slices = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        kernels = triton_kernels_for(device)
        assert kernels is not None
        self._write = kernels.qk_norm_rope_write
        self._attend = kernels.paged_attention
        self._decode = kernels.decode_attention

    @classmethod
    def unsupported_reason(
        cls, device: torch.device, dtype: torch.dtype, head_size: int, block_size: int
    ) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        if triton_kernels_for(device) is None:
            return "the package triton is not installed"
        if head_size > 512:
            return f"supports head sizes up to 512, and the model's is {head_size}"
        return None

    def forward(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Run decode steps in one kernel."""
        if batch.max_query_len > 1:
            return super().forward(layer, qkv, batch)
        return self._decode_step(layer, qkv, batch, reads=False)

    def read(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        if batch.max_query_len > 1:
            return super().read(layer, query, batch)
        return self._decode_step(layer, query, batch, reads=True)

    def _decode_step(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch, *, reads: bool
    ) -> torch.Tensor:
        return self._decode(
            qkv,
            layer.k_cache,
            layer.v_cache,
            batch.tables[layer.group].slots,
            batch.query_start_loc,
            batch.seq_lens,
            batch.tables[layer.group].blocks,
            rows=batch.rows,
            order=batch.order,
            num_heads=layer.shape.num_heads,
            max_seq_len=batch.max_seq_len,
            scale=layer.shape.scale,
            sliding_window=layer.shape.sliding_window,
            chunk=layer.shape.chunk,
            soft_cap=layer.shape.soft_cap,
            sinks=layer.shape.sinks,
            reads=reads,
            **layer.transform.arguments(batch),
        )

    def write(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return self._transform(layer, qkv, batch, layer.shape.num_kv_heads)

    def store(self, layer: AttentionLayer, kv: torch.Tensor, slots: torch.Tensor) -> None:
        self._write(
            kv,
            slots,
            layer.k_cache,
            layer.v_cache,
            num_heads=0,
            num_kv_heads=layer.shape.num_kv_heads,
        )

    def turn(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return self._transform(layer, query, batch, 0)

    def _transform(
        self, layer: AttentionLayer, qkv: torch.Tensor, batch: AttentionBatch, num_kv_heads: int
    ) -> torch.Tensor:
        return self._write(
            qkv,
            batch.tables[layer.group].slots,
            layer.k_cache,
            layer.v_cache,
            num_heads=layer.shape.num_heads,
            num_kv_heads=num_kv_heads,
            **layer.transform.arguments(batch),
        )

    def attend(
        self, layer: AttentionLayer, query: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        return self._attend(
            query,
            layer.k_cache,
            layer.v_cache,
            batch.query_start_loc,
            batch.seq_lens,
            batch.tables[layer.group].blocks,
            rows=batch.rows,
            order=batch.order,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            scale=layer.shape.scale,
            sliding_window=layer.shape.sliding_window,
            chunk=layer.shape.chunk,
            soft_cap=layer.shape.soft_cap,
            sinks=layer.shape.sinks,
            last_key=batch.last_key,
            is_decode=batch.verifies,
        )
