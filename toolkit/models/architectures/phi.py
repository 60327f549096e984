"""Phi-1, Phi-1.5 and Phi-2 (Li et al., 2023): attention and MLP in parallel after one norm."""

from toolkit.models.config.model_config import DecoderConfig, Size, require
from toolkit.models.describe import MLP, Branch, Decoder, Head, Layer
from toolkit.models.parts import attention, decoder, layer_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("PhiForCausalLM", "PhiModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 51200
    hidden_size: Size = 2048
    intermediate_size: Size = 8192
    num_hidden_layers: Size = 24
    hidden_act: str = "gelu_new"
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.5
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, qk_layernorm=(False,))


def describe(config: Config) -> Decoder:
    eps = config.layer_norm_eps

    def layer(name: str, index: int) -> Layer:
        norm = layer_norm(config, f"{name}.input_layernorm", eps)
        attn = attention(
            config,
            f"{name}.self_attn",
            output="dense",
            bias=True,
            out_bias=True,
            rope=config.rope(),
        )
        up, down = Source(f"{name}.mlp.fc1"), Source(f"{name}.mlp.fc2")
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, bias=True)
        return ((Branch(attn, norm), Branch(mlp, norm)),)

    norm = layer_norm(config, "model.final_layernorm", eps)
    return decoder(config, layer, norm, head=Head(bias=True))
