"""Nemotron-4 and Minitron (Parmar et al., 2024): squared ReLU, layer norms of 1 + w."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import MLP, Decoder, Layer
from toolkit.models.parts import attention, decoder, layer_norm, pre_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("NemotronForCausalLM", "NemotronModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 256000
    hidden_size: Size = 6144
    intermediate_size: Size = 24576
    num_attention_heads: Size = 48
    hidden_act: str = "relu2"
    max_position_embeddings: Size = 4096
    norm_eps: float = 1e-5
    partial_rotary_factor: float | None = None
    rope_percent: float | None = None
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        self.partial_rotary_factor = self.partial_rotary_factor or self.rope_percent or 0.5
        super().__post_init__()


def describe(config: Config) -> Decoder:
    bias, eps = config.attention_bias, config.norm_eps

    def layer(name: str, index: int) -> Layer:
        up, down = Source(f"{name}.mlp.up_proj"), Source(f"{name}.mlp.down_proj")
        return pre_norm(
            attention(config, f"{name}.self_attn", bias=bias, out_bias=bias, rope=config.rope()),
            layer_norm(config, f"{name}.input_layernorm", eps, offset=1.0),
            MLP(config.intermediate_size, config.hidden_act, up, down, bias=config.mlp_bias),
            layer_norm(config, f"{name}.post_attention_layernorm", eps, offset=1.0),
        )

    return decoder(config, layer, layer_norm(config, "model.norm", eps, offset=1.0))
