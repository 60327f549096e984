"""Gemma 1 (Gemma Team, 2024): Llama's decoder with norms of 1 + w and scaled embeddings."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Decoder, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, pre_norm, rms_norm

ARCHITECTURES = ("GemmaForCausalLM", "GemmaModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 256000
    hidden_size: Size = 3072
    intermediate_size: Size = 24576
    num_hidden_layers: Size = 28
    num_attention_heads: Size = 16
    head_dim: Size | None = 256
    hidden_act: str = "gelu_pytorch_tanh"
    hidden_activation: str | None = None
    max_position_embeddings: Size = 8192
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    def __post_init__(self) -> None:
        self.hidden_act = self.hidden_activation or self.hidden_act
        if self.hidden_act == "gelu":  # written by mistake: the models were trained with tanh's
            self.hidden_act = "gelu_pytorch_tanh"
        super().__post_init__()


def describe(config: Config) -> Decoder:
    def layer(name: str, index: int) -> Layer:
        bias = config.attention_bias
        return pre_norm(
            attention(config, f"{name}.self_attn", bias=bias, out_bias=bias, rope=config.rope()),
            rms_norm(config, f"{name}.input_layernorm", offset=1.0),
            gated_mlp(config, f"{name}.mlp"),
            rms_norm(config, f"{name}.post_attention_layernorm", offset=1.0),
        )

    norm = rms_norm(config, "model.norm", offset=1.0)
    return decoder(config, layer, norm, embed_scale=config.hidden_size**0.5)
