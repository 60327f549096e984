"""Llama 2, 3, 3.1 and later (Touvron et al., 2023; Grattafiori et al., 2024).

Mistral, Qwen2 and Qwen3 are this decoder with other values in `Variant`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from toolkit.attention import Attention, AttentionShape, HeadTransform
from toolkit.distributed import even_shard, kv_head_shard
from toolkit.layers import GatedLinear, Linear, MergedLinear, RMSNorm, RotaryEmbedding
from toolkit.models.decoder import Decoder, DecoderLayer
from toolkit.weights.activation import activation_kind
from toolkit.weights.slots import Slots


@dataclass(frozen=True, slots=True)
class Variant:
    """Differences between the Llama-like architectures."""

    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int, ...] = ()  # window of each layer; 0: full attention. Empty: all 0


class LlamaLayer(DecoderLayer):
    up: GatedLinear

    def __init__(self, config: Any, variant: Variant, index: int, rotary: RotaryEmbedding) -> None:
        super().__init__()
        hidden, num_heads, eps = config.hidden_size, config.num_attention_heads, config.rms_norm_eps
        num_kv_heads = config.num_key_value_heads or num_heads
        size = getattr(config, "head_dim", None) or hidden // num_heads
        heads, kv = even_shard(num_heads, "attention heads"), kv_head_shard(num_kv_heads)
        self.attn_norm = RMSNorm(hidden, eps)
        self.qkv = MergedLinear(
            hidden, (heads.times(size), kv.times(size), kv.times(size)), bias=variant.qkv_bias
        )
        self.q_norm = RMSNorm(size, eps) if variant.qk_norm else None
        self.k_norm = RMSNorm(size, eps) if variant.qk_norm else None
        window = variant.sliding_windows[index] if variant.sliding_windows else 0
        self.attn = Attention(
            AttentionShape(heads.count, kv.count, size, size**-0.5, window),
            HeadTransform(
                rotary.cos_sin,
                self.q_norm.weight if self.q_norm else None,
                self.k_norm.weight if self.k_norm else None,
                eps,
            ),
        )
        self.out = Linear(num_heads * size, hidden, bias=variant.out_bias, split="in")
        self.mlp_norm = RMSNorm(hidden, eps)
        inner, kind = config.intermediate_size, activation_kind(config.hidden_act)
        self.up = GatedLinear(hidden, inner, bias=variant.mlp_bias, activation=kind)
        self.down = Linear(inner, hidden, bias=variant.mlp_bias, split="in")

    def slots(self, name: str) -> Slots:
        attn, mlp = f"{name}.self_attn", f"{name}.mlp"
        slots = (
            self.attn_norm.slots(f"{name}.input_layernorm")
            | self.qkv.merged_slots([f"{attn}.{part}_proj" for part in "qkv"])
            | self.out.slots(f"{attn}.o_proj")
            | self.mlp_norm.slots(f"{name}.post_attention_layernorm")
            | self.up.merged_slots([f"{mlp}.gate_proj", f"{mlp}.up_proj"])
            | self.down.slots(f"{mlp}.down_proj")
        )
        if self.q_norm is not None and self.k_norm is not None:
            slots |= self.q_norm.slots(f"{attn}.q_norm") | self.k_norm.slots(f"{attn}.k_norm")
        return slots


class Llama(Decoder):
    embed_name, layers_name, norm_name = "model.embed_tokens", "model.layers", "model.norm"

    def layer_factory(self, config: Any, max_model_len: int) -> Callable[[int], LlamaLayer]:
        variant = self.variant(config)
        head_size = (
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        rotary = RotaryEmbedding(config, head_size, max_model_len)
        return lambda index: LlamaLayer(config, variant, index, rotary)

    def make_norm(self, config: Any) -> RMSNorm:
        return RMSNorm(config.hidden_size, config.rms_norm_eps)

    @staticmethod
    def variant(config: Any) -> Variant:
        bias = bool(getattr(config, "attention_bias", False))
        return Variant(
            qkv_bias=bias, out_bias=bias, mlp_bias=bool(getattr(config, "mlp_bias", False))
        )

    @staticmethod
    def max_positions(config: Any) -> int:
        return int(config.max_position_embeddings)


def sliding_windows(config: Any) -> tuple[int, ...]:
    """Return each layer's window: by `layer_types` if the config has them, else the same."""
    window = int(getattr(config, "sliding_window", None) or 0)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (window,) * int(config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
