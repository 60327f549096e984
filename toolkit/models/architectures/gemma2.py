"""Gemma 2 (Gemma Team, 2024): soft caps, alternating windows, norms before and after products."""

from typing import Any

from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Branch, Decoder, Head, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, rms_norm

ARCHITECTURES = ("Gemma2ForCausalLM", "Gemma2Model")


class Config(WindowedConfig, kw_only=True):
    overflows_float16: bool = True

    vocab_size: Size = 256000
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Size = 26
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Size = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    sliding_window: int | None = 4096
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0

    def __post_init__(self) -> None:
        self.hidden_act = self.hidden_activation
        if self.layer_types is None:
            kinds = ["sliding_attention", "full_attention"]
            self.layer_types = [kinds[i % 2] for i in range(self.num_hidden_layers)]
        super().__post_init__()


def describe(config: Config) -> Decoder:
    return gemma2_decoder(config, attn_logit_softcapping=config.attn_logit_softcapping)


def gemma2_decoder(
    config: Any, *, attn_logit_softcapping: float | None = None, **options: Any
) -> Decoder:
    """Describe a decoder with norms before and after attention and MLP.

    `options`: functions of a layer's name and index that return fields of `Attention`."""

    def layer(name: str, index: int) -> Layer:
        before, after, mlp_before, mlp_after = (
            rms_norm(config, f"{name}.{part}_layernorm", offset=1.0)
            for part in ("input", "post_attention", "pre_feedforward", "post_feedforward")
        )
        mix = attention(
            config,
            f"{name}.self_attn",
            scale=config.query_pre_attn_scalar**-0.5,
            bias=config.attention_bias,
            out_bias=config.attention_bias,
            rope=config.rope(config.layer_types[index]),
            window=config.window(index),
            soft_cap=attn_logit_softcapping or 0.0,
            **{field: option(name, index) for field, option in options.items()},
        )
        mlp = gated_mlp(config, f"{name}.mlp")
        return ((Branch(mix, before, after),), (Branch(mlp, mlp_before, mlp_after),))

    return decoder(
        config,
        layer,
        rms_norm(config, "model.norm", offset=1.0),
        head=Head(soft_cap=config.final_logit_softcapping or 0.0),
        embed_scale=config.hidden_size**0.5,
    )
