"""GPT-NeoX and Pythia (Black et al., 2022; Biderman et al., 2023)."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import MLP, Attention, Branch, Decoder, Layer
from toolkit.models.parts import decoder, layer_norm, pre_norm
from toolkit.weights.source import Source, consecutive, grouped

ARCHITECTURES = ("GPTNeoXForCausalLM", "GPTNeoXModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50432
    hidden_size: Size = 6144
    intermediate_size: Size = 24576
    num_hidden_layers: Size = 44
    num_attention_heads: Size = 64
    hidden_act: str = "gelu"
    layer_norm_eps: float = 1e-5
    attention_bias: bool = True
    use_parallel_residual: bool = True
    rotary_pct: float | None = None
    rotary_emb_base: float | None = None
    has_separate_qkv: bool = False  # q, k and v follow each other in their tensor, as in GGUF

    def __post_init__(self) -> None:
        self.rope_theta = self.rotary_emb_base or self.rope_theta
        self.partial_rotary_factor = self.rotary_pct or self.partial_rotary_factor or 0.25
        super().__post_init__()


def describe(config: Config) -> Decoder:
    heads, size, eps = config.num_attention_heads, config.head_dim or 0, config.layer_norm_eps

    def layer(name: str, index: int) -> Layer:
        width = heads * size
        parts = (
            consecutive(width, width, width)
            if config.has_separate_qkv
            else grouped(heads, size, size, size)
        )
        q, k, v = (Source(f"{name}.attention.query_key_value", part) for part in parts)
        out, up, down = (
            Source(f"{name}.{part}")
            for part in ("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        )
        bias = config.attention_bias
        attn = Attention(
            heads, heads, size, q, k, v, out, size**-0.5, bias, bias, rope=config.rope()
        )
        attn_norm = layer_norm(config, f"{name}.input_layernorm", eps)
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, bias=True)
        mlp_norm = layer_norm(config, f"{name}.post_attention_layernorm", eps)
        if config.use_parallel_residual:
            return ((Branch(attn, attn_norm), Branch(mlp, mlp_norm)),)
        return pre_norm(attn, attn_norm, mlp, mlp_norm)

    return decoder(
        config,
        layer,
        layer_norm(config, "gpt_neox.final_layer_norm", eps),
        embed="gpt_neox.embed_in",
        layers_name="gpt_neox.layers",
    )
