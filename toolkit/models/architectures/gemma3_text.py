"""Gemma 3, text only (Gemma Team, 2025): Gemma 2 with QK norm and two rotary bases."""

from typing import Any, ClassVar

from toolkit.models.architectures import gemma2
from toolkit.models.config.model_config import Size, require
from toolkit.models.describe import Decoder, HeadNorm

ARCHITECTURES = ("Gemma3ForCausalLM", "Gemma3TextModel")


class Config(gemma2.Config, kw_only=True):
    default_theta: ClassVar[float] = 1e6

    vocab_size: Size = 262208
    max_position_embeddings: Size = 131072
    attn_logit_softcapping: float | None = None
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Size | None = None
    _sliding_window_pattern: Size | None = None  # as Transformers writes it
    rope_local_base_freq: float = 10000.0

    def __post_init__(self) -> None:
        every = self.sliding_window_pattern or self._sliding_window_pattern or 6
        if self.layer_types is None:
            kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
            self.layer_types = [kinds[i % every] for i in range(self.num_hidden_layers)]
        super().__post_init__()
        require(self, attn_logit_softcapping=(None,))
        if "rope_theta" in (given := self.rope_parameters or {}):  # of full attention
            local = {"rope_type": "default", "rope_theta": self.rope_local_base_freq}
            self.rope_parameters = {"full_attention": given, "sliding_attention": local}


def describe(config: Config) -> Decoder:
    def norm(name: str, index: int) -> HeadNorm:
        q, k = (f"{name}.self_attn.{part}_norm" for part in "qk")
        return HeadNorm(q, k, config.rms_norm_eps, offset=1.0)

    options: dict[str, Any] = {"norm": norm}
    return gemma2.gemma2_decoder(config, **options)
