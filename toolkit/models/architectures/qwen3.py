"""Qwen3 (Yang et al., 2025): Llama's decoder with a norm on each head's query and key."""

from toolkit.models.architectures import qwen2
from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size
from toolkit.models.describe import Decoder, HeadNorm, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")


class Config(qwen2.Config, kw_only=True):
    head_dim: Size | None = 128
    attention_bias: bool = False


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        attn, bias = f"{name}.self_attn", config.attention_bias
        norm = HeadNorm(f"{attn}.q_norm", f"{attn}.k_norm", config.rms_norm_eps)
        return llama_layer(
            config, name, bias=bias, out_bias=bias, norm=norm, window=config.window(index)
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
