"""A model: Llama's decoder under a `model_type` of its own."""

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("TkExampleForCausalLM",)


class Config(DecoderConfig, kw_only=True):
    intermediate_size: Size = 128
    num_key_value_heads: Size | None = None


def describe(config: Config) -> Decoder:
    return decoder(
        config,
        lambda name, index: llama_layer(config, name),
        rms_norm(config, "model.norm"),
    )
