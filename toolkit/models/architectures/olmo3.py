"""OLMo 3 (OLMo Team, 2025): OLMo 2 with windows in three of four layers."""

from typing import ClassVar

from toolkit.models.architectures.olmo2 import olmo2_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("Olmo3ForCausalLM", "Olmo3Model")


class Config(WindowedConfig, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    vocab_size: Size = 50304
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    sliding_window: int | None = 4096

    def __post_init__(self) -> None:
        if self.layer_types is None:
            kinds = ["sliding_attention"] * 3 + ["full_attention"]
            self.layer_types = [kinds[i % 4] for i in range(self.num_hidden_layers)]
        super().__post_init__()
        given = self.rope_parameters or {}
        if "rope_theta" in given:  # scaling is for full attention
            local = {"rope_type": "default", "rope_theta": given["rope_theta"]}
            self.rope_parameters = {"full_attention": given, "sliding_attention": local}


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        kind = (config.layer_types or [])[index]
        return olmo2_layer(config, name, rope=config.rope(kind), window=config.window(index))

    return decoder(config, layer, rms_norm(config, "model.norm"))
