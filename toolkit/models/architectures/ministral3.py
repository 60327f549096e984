"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN and queries scaled by position."""

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder, Layer, QueryScaling
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("Ministral3ForCausalLM", "Ministral3Model")

DEFAULT_ROPE = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "max_position_embeddings": 262144,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


class Config(WindowedConfig, kw_only=True):
    vocab_size: Size = 131072
    intermediate_size: Size = 14336
    num_hidden_layers: Size = 34
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    max_position_embeddings: Size = 262144
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if not (self.rope_parameters or self.rope_scaling):
            self.rope_parameters = dict(DEFAULT_ROPE)
        super().__post_init__()


def describe(config: Config) -> Decoder:
    given = config.rope_parameters or {}
    beta, length = given.get("llama_4_scaling_beta"), given.get("original_max_position_embeddings")
    scaling = None
    if beta is not None and length:
        scaling = QueryScaling(float(beta), int(length))

    def layer(name: str, index: int) -> Layer:
        rope = config.rope(query_scaling=scaling)
        return llama_layer(config, name, rope=rope, window=config.window(index))

    return decoder(config, layer, rms_norm(config, "model.norm"))
