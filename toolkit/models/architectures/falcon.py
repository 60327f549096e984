"""Falcon (Almazrouei et al., 2023), without ALiBi. Falcon 3 has Llama's architecture."""

from toolkit.models.config.model_config import DecoderConfig, Size, require
from toolkit.models.describe import MLP, Attention, Branch, Decoder, Layer
from toolkit.models.parts import decoder, layer_norm, pre_norm
from toolkit.weights.source import Source, consecutive, grouped

ARCHITECTURES = ("FalconForCausalLM", "FalconModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 65024
    hidden_size: Size = 4544
    num_attention_heads: Size = 71
    num_kv_heads: Size | None = None
    ffn_hidden_size: Size | None = None
    layer_norm_epsilon: float = 1e-5
    activation: str = "gelu"
    bias: bool = False
    alibi: bool = False
    multi_query: bool = True
    parallel_attn: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    has_separate_qkv: bool = False  # q, k and v follow each other in their tensor, as in GGUF
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        heads = self.num_kv_heads if self.new_decoder_architecture else int(self.multi_query)
        self.num_key_value_heads = heads or self.num_attention_heads
        self.head_dim = None
        super().__post_init__()
        norms = (None, 1, 2) if self.new_decoder_architecture else (None, 1)
        require(self, alibi=(False,), num_ln_in_parallel_attn=norms)


def describe(config: Config) -> Decoder:
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None
    assert size is not None
    parts = grouped(kv_heads, heads // kv_heads * size, size, size)
    if kv_heads == 1 or config.has_separate_qkv:
        parts = consecutive(heads * size, kv_heads * size, kv_heads * size)

    def layer(name: str, index: int) -> Layer:
        q, k, v = (Source(f"{name}.self_attention.query_key_value", part) for part in parts)
        out = Source(f"{name}.self_attention.dense")
        up, down = Source(f"{name}.mlp.dense_h_to_4h"), Source(f"{name}.mlp.dense_4h_to_h")
        inner, bias = config.ffn_hidden_size or 4 * config.hidden_size, config.bias
        attn = Attention(
            heads, kv_heads, size, q, k, v, out, size**-0.5, bias, bias, rope=config.rope()
        )
        mlp = MLP(inner, config.activation, up, down, bias=bias)
        separate = config.new_decoder_architecture and config.num_ln_in_parallel_attn != 1
        names = ("ln_attn", "ln_mlp") if separate else ("input_layernorm", "input_layernorm")
        if not (config.new_decoder_architecture or config.parallel_attn):
            names = ("input_layernorm", "post_attention_layernorm")
        norms = [layer_norm(config, f"{name}.{n}", config.layer_norm_epsilon) for n in names]
        if names[1] == "post_attention_layernorm":
            return pre_norm(attn, norms[0], mlp, norms[1])
        return ((Branch(attn, norms[0]), Branch(mlp, norms[1])),)

    return decoder(
        config,
        layer,
        layer_norm(config, "transformer.ln_f", config.layer_norm_epsilon),
        embed="transformer.word_embeddings",
        layers_name="transformer.h",
    )
