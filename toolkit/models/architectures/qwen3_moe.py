"""Qwen3-MoE (Yang et al., 2025): Qwen3's decoder with experts."""

from collections.abc import Callable

from toolkit.models.architectures import qwen2_moe
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, gated_experts, rms_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("Qwen3MoeForCausalLM", "Qwen3MoeModel")


class Config(qwen2_moe.Config, kw_only=True):
    intermediate_size: Size = 6144
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = 4
    attention_bias: bool = False
    num_experts: Size = 128
    num_experts_per_tok: Size = 8
    moe_intermediate_size: Size = 768

    def is_windowed(self, index: int) -> bool:
        return True


def describe(
    config: Config, experts_of: Callable[[str], dict[str, Source]] = lambda name: {}
) -> Decoder:
    """`experts_of`: sources of the experts of a block, if each has no tensors of its own."""

    def layer(name: str, index: int) -> Layer:
        attn, bias = f"{name}.self_attn", config.attention_bias
        experts = gated_experts(
            config,
            f"{name}.mlp",
            (config.num_experts, config.num_experts_per_tok),
            size=config.moe_intermediate_size,
            renormalizes=config.norm_topk_prob,
            **experts_of(f"{name}.mlp.experts"),
        )
        return llama_layer(
            config,
            name,
            mlp=experts if config.has_experts(index) else None,
            bias=bias,
            out_bias=bias,
            norm=HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps),
            window=config.window(index),
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
