"""Seed-OSS (ByteDance Seed, 2025): Llama's decoder with biases of queries, keys and values."""

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("SeedOssForCausalLM", "SeedOssModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 155136
    hidden_size: Size = 4096
    intermediate_size: Size = 27648
    num_hidden_layers: Size = 64
    num_attention_heads: Size = 80
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Size = 524288
    attention_bias: bool = True
    attention_out_bias: bool = False
    mlp_bias: bool = False


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        return llama_layer(
            config,
            name,
            mlp_bias=config.mlp_bias,
            bias=config.attention_bias,
            out_bias=config.attention_out_bias,
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
