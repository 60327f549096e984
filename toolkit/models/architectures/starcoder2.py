"""StarCoder 2 (Lozhkov et al., 2024)."""

from typing import ClassVar

from toolkit.models.config.model_config import Size, WindowedConfig
from toolkit.models.describe import MLP, Decoder, Layer
from toolkit.models.parts import attention, decoder, layer_norm, pre_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("Starcoder2ForCausalLM", "Starcoder2Model")


class Config(WindowedConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "activation_function": ("gelu", "gelu_pytorch_tanh"),  # hidden_act is used
        "layer_norm_epsilon": (1e-5,),
        "mlp_type": ("default",),
        "norm_type": ("layer_norm",),
        "scale_attn_weights": (True,),
    }

    vocab_size: Size = 49152
    hidden_size: Size = 3072
    intermediate_size: Size = 12288
    num_hidden_layers: Size = 30
    num_attention_heads: Size = 24
    num_key_value_heads: Size | None = 2
    hidden_act: str = "gelu_pytorch_tanh"
    max_position_embeddings: Size = 4096
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    tie_word_embeddings: bool = True


def describe(config: Config) -> Decoder:
    bias, eps = config.use_bias, config.norm_epsilon

    def layer(name: str, index: int) -> Layer:
        window, rope = config.window(index), config.rope()
        up, down = Source(f"{name}.mlp.c_fc"), Source(f"{name}.mlp.c_proj")
        return pre_norm(
            attention(
                config, f"{name}.self_attn", bias=bias, out_bias=bias, rope=rope, window=window
            ),
            layer_norm(config, f"{name}.input_layernorm", eps),
            MLP(config.intermediate_size, config.hidden_act, up, down, bias=bias),
            layer_norm(config, f"{name}.post_attention_layernorm", eps),
        )

    return decoder(config, layer, layer_norm(config, "model.norm", eps))
