"""Llama 2, 3, 3.1 and later (Touvron et al., 2023; Grattafiori et al., 2024)."""

from typing import Any

from toolkit.models.config.model_config import DecoderConfig
from toolkit.models.describe import MLP, Decoder, Experts, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, pre_norm, rms_norm

ARCHITECTURES = ("LlamaForCausalLM", "LlamaModel")


class Config(DecoderConfig, kw_only=True):
    attention_bias: bool = False
    mlp_bias: bool = False


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        bias = config.attention_bias
        return llama_layer(config, name, mlp_bias=config.mlp_bias, bias=bias, out_bias=bias)

    return decoder(config, layer, rms_norm(config, "model.norm"))


def llama_layer(
    config: Any,
    name: str,
    *,
    mlp: MLP | Experts | None = None,
    mlp_bias: bool = False,
    **options: Any,
) -> Layer:
    """Describe a layer with Llama's names.

    `mlp`: an `MLP` or `Experts` in place of Llama's; `options`: fields of `Attention`."""
    given = {"rope": config.rope(), **options}
    return pre_norm(
        attention(config, f"{name}.self_attn", **given),
        rms_norm(config, f"{name}.input_layernorm"),
        mlp or gated_mlp(config, f"{name}.mlp", bias=mlp_bias),
        rms_norm(config, f"{name}.post_attention_layernorm"),
    )
