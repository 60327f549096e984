"""OLMo 2 (OLMo Team, 2024): norms after attention and MLP, QK norm over all heads."""

from typing import Any

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Branch, Decoder, HeadNorm, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, rms_norm

ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo2Model")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


def describe(config: Config) -> Decoder:
    return decoder(
        config,
        lambda name, index: olmo2_layer(config, name, rope=config.rope()),
        rms_norm(config, "model.norm"),
    )


def olmo2_layer(config: Any, name: str, **options: Any) -> Layer:
    """Describe a layer of OLMo 2. `options`: fields of `Attention`."""
    attn, bias = f"{name}.self_attn", config.attention_bias
    norm = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps, "all")
    mix = attention(config, attn, bias=bias, out_bias=bias, norm=norm, **options)
    after, mlp_after = (
        rms_norm(config, f"{name}.{part}_layernorm")
        for part in ("post_attention", "post_feedforward")
    )
    mlp = gated_mlp(config, f"{name}.mlp")
    return ((Branch(mix, None, after),), (Branch(mlp, None, mlp_after),))
