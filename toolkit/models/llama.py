"""Llama 2, 3, 3.1 and later (Touvron et al., 2023; Grattafiori et al., 2024), and what is shared by its kin.

Mistral, Qwen2 and Qwen3 are this decoder with other values in `Shape`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.attention import Attention, AttentionBatch, AttentionShape, HeadTransform
from toolkit.distributed import even, kv_heads
from toolkit.layers import (
    GatedLinear,
    Linear,
    MergedLinear,
    RMSNorm,
    RotaryEmbedding,
    Slots,
    activation_kind,
)
from toolkit.models.decoder import Decoder, DecoderLayer


@dataclass(frozen=True, slots=True)
class Shape:
    """What the kin differ in."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()
    """One for each layer; 0: the whole context. Empty: all 0."""


class SelfAttention(nn.Module):
    def __init__(self, config: Any, shape: Shape, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, num_heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        num_kv_heads = config.num_key_value_heads or num_heads
        size = getattr(config, "head_dim", None) or hidden // num_heads
        heads, kv = even(num_heads, "attention heads"), kv_heads(num_kv_heads)
        self.qkv = MergedLinear(
            hidden, (heads.times(size), kv.times(size), kv.times(size)), bias=shape.qkv_bias
        )
        self.q_norm = RMSNorm(size, eps) if shape.qk_norm else None
        self.k_norm = RMSNorm(size, eps) if shape.qk_norm else None
        window = shape.sliding_windows[index] if shape.sliding_windows else 0
        self.attn = Attention(
            AttentionShape(heads.count, kv.count, size, size**-0.5, window),
            HeadTransform(
                rotary.cos_sin,
                self.q_norm.weight if self.q_norm else None,
                self.k_norm.weight if self.k_norm else None,
                eps,
            ),
        )
        self.out = Linear(num_heads * size, hidden, bias=shape.out_bias, split="in")

    def forward(self, x: torch.Tensor, batch: AttentionBatch, wanted: torch.Tensor | None) -> torch.Tensor:
        """Of the tokens `wanted`, or all."""
        x = self.attn(self.qkv(x), batch)
        out: torch.Tensor = self.out(x if wanted is None else x[wanted])
        return out

    def slots(self, name: str) -> Slots:
        slots = self.qkv.merged_slots([f"{name}.{part}_proj" for part in "qkv"]) | self.out.slots(
            f"{name}.o_proj"
        )
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.slots(f"{name}.q_norm") | self.k_norm.slots(f"{name}.k_norm")
        return slots


class GatedMLP(nn.Module):
    """down(act(gate(x)) · up(x)) (Shazeer, 2020)."""

    def __init__(self, config: Any, shape: Shape) -> None:
        super().__init__()
        inner = config.intermediate_size
        self.gate_up = GatedLinear(
            config.hidden_size, inner, bias=shape.mlp_bias, activation=activation_kind(config.hidden_act)
        )
        self.down = Linear(inner, config.hidden_size, bias=shape.mlp_bias, split="in")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.gate_up(x))
        return out

    def slots(self, name: str) -> Slots:
        merged = self.gate_up.merged_slots([f"{name}.gate_proj", f"{name}.up_proj"])
        return merged | self.down.slots(f"{name}.down_proj")


class Layer(DecoderLayer):
    def __init__(self, config: Any, shape: Shape, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = SelfAttention(config, shape, index, rotary)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config, shape)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        batch: AttentionBatch,
        wanted: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(output, residual stream) of the tokens `wanted`, or all."""
        x, residual = self.attn_norm(x, residual)
        x = self.attn(x, batch, wanted)
        x, residual = self.mlp_norm(x, residual if wanted is None else residual[wanted])
        return self.mlp(x), residual

    def slots(self, name: str) -> Slots:
        return (
            self.attn_norm.slots(f"{name}.input_layernorm")
            | self.attn.slots(f"{name}.self_attn")
            | self.mlp_norm.slots(f"{name}.post_attention_layernorm")
            | self.mlp.slots(f"{name}.mlp")
        )


class Llama(Decoder):
    embed_name, layers_name, norm_name = "model.embed_tokens", "model.layers", "model.norm"

    def layer_maker(self, config: Any, max_model_len: int) -> Callable[[int], Layer]:
        shape = self.shape(config)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = RotaryEmbedding(config, head_size, max_model_len)
        return lambda index: Layer(config, shape, index, rotary)

    def make_norm(self, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def shape(config: Any) -> Shape:
        bias = bool(getattr(config, "attention_bias", False))
        return Shape(qkv_bias=bias, out_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False)))

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.max_position_embeddings)


def sliding_windows(config: Any) -> tuple[int, ...]:
    """Each layer's window, from `layer_types` where the config has it, else `sliding_window` for all."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
