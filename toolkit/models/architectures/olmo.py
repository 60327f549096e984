"""OLMo 1 (Groeneveld et al., 2024): norms without parameters, and clipped queries, keys, values."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, layer_norm, pre_norm

ARCHITECTURES = ("OlmoForCausalLM", "OlmoModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50304
    attention_bias: bool = False
    clip_qkv: float | None = None


def describe(config: Config) -> Decoder:
    norm, bias = layer_norm(config, None, 1e-5, has_bias=False), config.attention_bias

    def layer(name: str, index: int) -> Layer:
        attn = attention(
            config,
            f"{name}.self_attn",
            bias=bias,
            out_bias=bias,
            rope=config.rope(),
            clip=config.clip_qkv or 0.0,
        )
        return pre_norm(attn, norm, gated_mlp(config, f"{name}.mlp"), norm)

    return decoder(config, layer, norm)
