"""GPT-2 (Radford et al., 2019)."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from toolkit.attention import Attention, AttentionBatch, AttentionShape
from toolkit.distributed import even_shard
from toolkit.errors import CheckpointError
from toolkit.layers import Embedding, LayerNorm, Linear, MergedLinear
from toolkit.models.decoder import Decoder, DecoderLayer
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slots


class GPT2Layer(DecoderLayer):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        hidden = config.n_embd
        head_size = hidden // config.n_head
        scale = head_size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        self.attn_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        heads = even_shard(config.n_head, "attention heads")
        self.qkv = MergedLinear(hidden, [heads.times(head_size)] * 3, bias=True)
        self.attn = Attention(AttentionShape(heads.count, heads.count, head_size, scale))
        self.out = Linear(hidden, hidden, bias=True, split="in")
        self.mlp_norm = LayerNorm(hidden, config.layer_norm_epsilon)
        inner = config.n_inner or 4 * hidden
        kind = activation_kind(config.activation_function)
        self.up = Linear(hidden, inner, bias=True, activation=kind, split="out")
        self.down = Linear(inner, hidden, bias=True, split="in")

    def slots(self, name: str) -> Slots:
        return (
            self.attn_norm.slots(f"{name}.ln_1")
            | self.qkv.slots(f"{name}.attn.c_attn", transpose=True)
            | self.out.slots(f"{name}.attn.c_proj", transpose=True)
            | self.mlp_norm.slots(f"{name}.ln_2")
            | self.up.slots(f"{name}.mlp.c_fc", transpose=True)
            | self.down.slots(f"{name}.mlp.c_proj", transpose=True)
        )


class GPT2(Decoder):
    embed_name, layers_name, norm_name = "transformer.wte", "transformer.h", "transformer.ln_f"

    def __init__(self, config: Any, max_model_len: int) -> None:
        if getattr(config, "add_cross_attention", False):
            raise CheckpointError(
                "GPT-2 with cross attention (add_cross_attention) is not supported."
            )
        super().__init__(config, max_model_len)
        if self.stage.is_first:
            self.embed_positions = Embedding(config.n_positions, config.n_embd)

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.n_positions)

    def layer_factory(self, config: Any, max_model_len: int) -> Callable[[int], GPT2Layer]:
        return functools.partial(GPT2Layer, config)

    def make_norm(self, config: Any) -> LayerNorm:
        return LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def embed_input(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        positions: torch.Tensor = self.embed_positions(batch.positions)
        return super().embed_input(token_ids, batch) + positions

    def slots(self) -> Slots:
        slots = super().slots()
        return (
            slots | self.embed_positions.slots("transformer.wpe") if self.stage.is_first else slots
        )
