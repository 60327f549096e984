"""Helium 1 (Kyutai, 2025): Llama's decoder with interleaved rotation."""

from typing import ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, interleaved, rms_norm

ARCHITECTURES = ("HeliumForCausalLM", "HeliumModel")


class Config(DecoderConfig, kw_only=True):
    default_theta: ClassVar[float] = 100000.0

    vocab_size: Size = 48000
    hidden_size: Size = 2560
    intermediate_size: Size = 7040
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 20
    head_dim: Size | None = 128
    max_position_embeddings: Size = 4096
    rms_norm_eps: float = 1e-8
    attention_bias: bool = False
    mlp_bias: bool = False


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        sources = interleaved(config, f"{name}.self_attn")
        bias = config.attention_bias
        return llama_layer(config, name, mlp_bias=config.mlp_bias, bias=bias, **sources)

    return decoder(config, layer, rms_norm(config, "model.norm"))
