"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch, AttentionShape
from toolkit.distributed import even
from toolkit.errors import CheckpointError
from toolkit.layers import (
    Embedding,
    LayerNorm,
    Linear,
    MergedLinear,
    OutputHead,
    Slots,
    VocabularyEmbedding,
    activation_kind,
)
from toolkit.models.registry import CausalLM


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden = config.n_embd
        head_size = hidden // config.n_head
        scale = head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        self.attn_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        heads = even(config.n_head, "attention heads")
        self.qkv = MergedLinear(hidden, [heads.times(head_size)] * 3, bias=True)
        self.attn = Attention(AttentionShape(heads.count, heads.count, head_size, scale))
        self.attn_out = Linear(hidden, hidden, bias=True, split="in")
        self.mlp_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        inner = config.n_inner or 4 * hidden
        kind = activation_kind(config.activation_function)
        self.up = Linear(hidden, inner, bias=True, activation=kind, split="out")
        self.down = Linear(inner, hidden, bias=True, split="in")

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual stream) of the tokens `wanted`, or all."""
        x, residual = self.attn_norm(x, residual)
        x = self.attn(self.qkv(x), batch)
        if wanted is not None:
            x, residual = x[wanted], residual[wanted]
        x, residual = self.mlp_norm(self.attn_out(x), residual)
        return self.down(self.up(x)), residual

    def slots(self, name: str) -> Slots:
        return (
            self.attn_norm.slots(f"{name}.ln_1")
            | self.qkv.slots(f"{name}.attn.c_attn", transpose=True)
            | self.attn_out.slots(f"{name}.attn.c_proj", transpose=True)
            | self.mlp_norm.slots(f"{name}.ln_2")
            | self.up.slots(f"{name}.mlp.c_fc", transpose=True)
            | self.down.slots(f"{name}.mlp.c_proj", transpose=True)
        )


class GPT2(CausalLM):
    def __init__(self, config: Any, max_model_len: int) -> None:
        super().__init__(config, max_model_len)
        if getattr(config, "add_cross_attention", False):
            raise CheckpointError("GPT-2 with cross attention (add_cross_attention) is not supported.")
        self.vocab_size = config.vocab_size
        self.tied = config.tie_word_embeddings
        self.embed = VocabularyEmbedding(config.vocab_size, config.n_embd)
        self.embed_positions = Embedding(config.n_positions, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.n_layer))
        self.norm = LayerNorm(config.n_embd, config.layer_norm_epsilon)
        self.lm_head = OutputHead(config.n_embd, config.vocab_size, self.embed if self.tied else None)

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.n_positions)

    def forward(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        x, residual = self.embed(token_ids) + self.embed_positions(batch.positions), None
        *blocks, last = self.blocks
        for block in blocks:
            x, residual = block(x, residual, batch)
        x, residual = last(x, residual, batch, batch.wanted)
        normed: torch.Tensor = self.norm(x, residual)[0]
        return normed

    def slots(self) -> Slots:
        slots = self.embed.slots("transformer.wte") | self.embed_positions.slots("transformer.wpe")
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            slots |= block.slots(f"transformer.h.{i}")
        slots |= self.norm.slots("transformer.ln_f")
        return slots if self.tied else slots | self.lm_head.slots("lm_head")
