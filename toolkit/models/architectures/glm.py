"""GLM-4-9B (GLM Team, 2024): Llama's decoder with interleaved partial rotation."""

from typing import Any

from toolkit.models.architectures.phi3 import fused_mlp
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Attention, Decoder
from toolkit.models.parts import attention, decoder, interleaved, pre_norm, rms_norm

ARCHITECTURES = ("GlmForCausalLM", "GlmModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 151552
    intermediate_size: Size = 13696
    num_hidden_layers: Size = 40
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1.5625e-07
    partial_rotary_factor: float | None = 0.5
    attention_bias: bool = True


def describe(config: Config) -> Decoder:
    return decoder(
        config,
        lambda name, index: pre_norm(
            glm_attention(config, f"{name}.self_attn"),
            rms_norm(config, f"{name}.input_layernorm"),
            fused_mlp(config, f"{name}.mlp"),
            rms_norm(config, f"{name}.post_attention_layernorm"),
        ),
        rms_norm(config, "model.norm"),
    )


def glm_attention(config: Any, name: str) -> Attention:
    rope = config.rope()
    size = int(config.head_dim * rope.parameters["partial_rotary_factor"])
    sources = interleaved(config, name, size)
    return attention(config, name, bias=config.attention_bias, rope=rope, **sources)
