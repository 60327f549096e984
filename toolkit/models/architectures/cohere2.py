"""Command R7B and A (Cohere, 2024): Command R with windows, and global layers without rotation."""

from typing import ClassVar

from toolkit.models.architectures.cohere import cohere_decoder, cohere_layer
from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import Decoder, Layer

ARCHITECTURES = ("Cohere2ForCausalLM", "Cohere2Model")


class Config(WindowedConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "layer_switch": (4,),
        "order_of_interleaved_layers": ("local_attn_first",),
        "position_embedding_type": ("rope_gptj",),
        "rotary_pct": (1.0,),
        "use_embedding_sharing": (True,),
        "use_gated_activation": (True,),
        "use_parallel_block": (True,),
    }

    vocab_size: Size = 256000
    hidden_size: Size = 8192
    intermediate_size: Size = 22528
    num_hidden_layers: Size = 40
    num_attention_heads: Size = 64
    max_position_embeddings: Size = 8192
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    attention_bias: bool = False
    sliding_window: int | None = 4096
    sliding_window_pattern: Size | None = None
    _sliding_window_pattern: Size | None = None  # as Transformers writes it
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        self.head_dim = None  # always hidden_size / num_attention_heads
        every = self.sliding_window_pattern or self._sliding_window_pattern or 4
        if self.layer_types is None:
            kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
            self.layer_types = [kinds[i % every] for i in range(self.num_hidden_layers)]
        super().__post_init__()


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        window = config.window(index)
        return cohere_layer(config, name, window=window, rope=config.rope() if window else None)

    return cohere_decoder(config, layer)
