"""Mistral (Jiang et al., 2023): Llama's decoder with a sliding window."""

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("MistralForCausalLM", "MistralModel")


class Config(WindowedConfig, kw_only=True):
    intermediate_size: Size = 14336
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131072
    sliding_window: int | None = 4096


def describe(config: Config) -> Decoder:
    return decoder(
        config,
        lambda name, index: llama_layer(config, name, window=config.window(index)),
        rms_norm(config, "model.norm"),
    )
