"""SmolLM3 (Hugging Face, 2025): Llama's decoder with layers that do not rotate (NoPE)."""

from typing import ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("SmolLM3ForCausalLM", "SmolLM3Model")


class Config(WindowedConfig, kw_only=True):
    default_theta: ClassVar[float] = 2e6

    vocab_size: Size = 128256
    hidden_size: Size = 2048
    num_hidden_layers: Size = 36
    num_attention_heads: Size = 16
    num_key_value_heads: Size | None = 4
    max_position_embeddings: Size = 32768
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    no_rope_layers: list[int] | None = None  # 1 for layers that rotate, else 0
    no_rope_layer_interval: Size = 4

    def __post_init__(self) -> None:
        every, count = self.no_rope_layer_interval, self.num_hidden_layers
        if self.no_rope_layers is None:
            self.no_rope_layers = [int((i + 1) % every != 0) for i in range(count)]
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            kinds = [
                "sliding_attention" if self.sliding_window else "full_attention",
                "full_attention",
            ]
            self.layer_types = [kinds[rotates] for rotates in self.no_rope_layers]
        super().__post_init__()


def describe(config: Config) -> Decoder:
    rotates, bias = config.no_rope_layers or [], config.attention_bias

    def layer(name: str, index: int) -> Layer:
        rope, window = config.rope() if rotates[index] else None, config.window(index)
        return llama_layer(
            config,
            name,
            mlp_bias=config.mlp_bias,
            bias=bias,
            out_bias=bias,
            rope=rope,
            window=window,
        )

    return decoder(config, layer, rms_norm(config, "model.norm"))
