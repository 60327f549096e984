"""Qwen2 and Qwen2.5 (Yang et al., 2024): Llama's decoder with biases and, in part, windows."""

from typing import ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder
from toolkit.models.parts import decoder, rms_norm

ARCHITECTURES = ("Qwen2ForCausalLM", "Qwen2Model")


class Config(WindowedConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"attention_bias": (True, False)}

    vocab_size: Size = 151936
    intermediate_size: Size = 22016
    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32768
    sliding_window: int | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28
    """See `is_windowed`. Not read if `layer_types` is given."""

    def __post_init__(self) -> None:
        if not self.use_sliding_window:
            self.sliding_window = None
        if self.layer_types is None:
            self.layer_types = [
                "sliding_attention"
                if self.sliding_window and self.is_windowed(i)
                else "full_attention"
                for i in range(self.num_hidden_layers)
            ]
        super().__post_init__()

    def is_windowed(self, index: int) -> bool:
        """Return True if a layer has a window, where the model has windows."""
        return index >= self.max_window_layers


def describe(config: Config) -> Decoder:
    return decoder(
        config,
        lambda name, index: llama_layer(config, name, bias=True, window=config.window(index)),
        rms_norm(config, "model.norm"),
    )
