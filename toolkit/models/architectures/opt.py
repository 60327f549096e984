"""OPT (Zhang et al., 2022), with norms before attention and MLP."""

from toolkit.models.config.model_config import DecoderConfig, Size, require
from toolkit.models.describe import MLP, Decoder, Layer, Table
from toolkit.models.parts import attention, decoder, layer_norm, pre_norm
from toolkit.weights.source import Source

ARCHITECTURES = ("OPTForCausalLM", "OPTModel")
FIRST_POSITION = 2  # row of the position table for the first token


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50272
    hidden_size: Size = 768
    num_hidden_layers: Size = 12
    num_attention_heads: Size = 12
    ffn_dim: Size = 3072
    activation_function: str = "relu"
    enable_bias: bool = True
    tie_word_embeddings: bool = True
    do_layer_norm_before: bool = True
    word_embed_proj_dim: Size | None = None
    layer_norm_elementwise_affine: bool = True
    _remove_final_layer_norm: bool = False

    def __post_init__(self) -> None:
        require(self, rope_scaling=(None,), rope_parameters=(None,))  # it does not rotate
        super().__post_init__()
        require(
            self,
            do_layer_norm_before=(True,),
            word_embed_proj_dim=(None, self.hidden_size),
            layer_norm_elementwise_affine=(True,),
            _remove_final_layer_norm=(False,),
        )


def describe(config: Config) -> Decoder:
    bias = config.enable_bias

    def layer(name: str, index: int) -> Layer:
        up, down = Source(f"{name}.fc1"), Source(f"{name}.fc2")
        return pre_norm(
            attention(config, f"{name}.self_attn", output="out_proj", bias=bias, out_bias=bias),
            layer_norm(config, f"{name}.self_attn_layer_norm", 1e-5),
            MLP(config.ffn_dim, config.activation_function, up, down, bias=bias),
            layer_norm(config, f"{name}.final_layer_norm", 1e-5),
        )

    root, rows = "model.decoder", config.max_position_embeddings + FIRST_POSITION
    return decoder(
        config,
        layer,
        layer_norm(config, f"{root}.final_layer_norm", 1e-5),
        embed=f"{root}.embed_tokens",
        layers_name=f"{root}.layers",
        positions=Table(f"{root}.embed_positions", rows, FIRST_POSITION),
    )
