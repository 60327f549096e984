"""Granite 3 (Granite Team, 2024): Llama's decoder with multipliers."""

from typing import Any

from toolkit.models.describe import Branch, Decoder, Head, Layer
from toolkit.models.model_config import DecoderConfig
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
    bias, scale = config.attention_bias, config.residual_multiplier

    def layer(name: str, index: int) -> Layer:
        options: dict[str, Any] = {"bias": bias, "out_bias": bias, "rope": config.rope()}
        attn = attention(config, f"{name}.self_attn", scale=config.attention_multiplier, **options)
        mlp = gated_mlp(config, f"{name}.mlp", bias=config.mlp_bias)
        attn_norm = rms_norm(config, f"{name}.input_layernorm")
        mlp_norm = rms_norm(config, f"{name}.post_attention_layernorm")
        return ((Branch(attn, attn_norm, None, scale),), (Branch(mlp, mlp_norm, None, scale),))

    return decoder(
        config,
        layer,
        rms_norm(config, "model.norm"),
        head=Head(scale=1 / config.logits_scaling),
        embed_scale=config.embedding_multiplier,
    )
