"""ERNIE 4.5, dense (Baidu, 2025): Llama's decoder with interleaved rotation."""

from typing import ClassVar

from toolkit.models.architectures.llama import llama_layer
from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import decoder, interleaved, rms_norm

ARCHITECTURES = ("Ernie4_5ForCausalLM", "Ernie4_5Model")


class Config(DecoderConfig, kw_only=True):
    default_theta: ClassVar[float] = 500000.0
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "compression_ratio": (1.0,),
        "use_rmsnorm": (True,),
    }

    vocab_size: Size = 103424
    hidden_size: Size = 1024
    intermediate_size: Size = 3072
    num_hidden_layers: Size = 18
    num_attention_heads: Size = 16
    num_key_value_heads: Size | None = 2
    head_dim: Size | None = 128
    max_position_embeddings: Size = 131072
    rms_norm_eps: float = 1e-5
    use_bias: bool = False
    tie_word_embeddings: bool = True


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        bias, sources = config.use_bias, interleaved(config, f"{name}.self_attn")
        return llama_layer(config, name, mlp_bias=bias, bias=bias, out_bias=bias, **sources)

    return decoder(config, layer, rms_norm(config, "model.norm"))
