"""Granite 3 (Granite Team, 2024): Llama's decoder with multipliers."""

from collections.abc import Callable
from typing import Any

from toolkit.models.config.model_config import DecoderConfig
from toolkit.models.describe import MLP, Branch, Decoder, Experts, Head, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, rms_norm

ARCHITECTURES = ("GraniteForCausalLM", "GraniteModel")


class Config(DecoderConfig, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0


def describe(config: Config) -> Decoder:
    return granite_decoder(
        config, lambda name: gated_mlp(config, f"{name}.mlp", bias=config.mlp_bias)
    )


def granite_decoder(config: Any, mlp: Callable[[str], MLP | Experts]) -> Decoder:
    """Describe a decoder with Granite's multipliers. `mlp`: of a layer, given its name."""
    bias, scale = config.attention_bias, config.residual_multiplier

    def layer(name: str, index: int) -> Layer:
        options: dict[str, Any] = {"bias": bias, "out_bias": bias, "rope": config.rope()}
        attn = attention(config, f"{name}.self_attn", scale=config.attention_multiplier, **options)
        attn_norm = rms_norm(config, f"{name}.input_layernorm")
        mlp_norm = rms_norm(config, f"{name}.post_attention_layernorm")
        return (
            (Branch(attn, attn_norm, None, scale),),
            (Branch(mlp(name), mlp_norm, None, scale),),
        )

    return decoder(
        config,
        layer,
        rms_norm(config, "model.norm"),
        head=Head(scale=1 / config.logits_scaling),
        embed_scale=config.embedding_multiplier,
    )
