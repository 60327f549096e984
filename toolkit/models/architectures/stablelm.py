"""StableLM (Bellagente et al., 2024): layer norms, partial rotation, and QK norm for each head."""

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Branch, Decoder, HeadNorm, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, layer_norm, pre_norm

ARCHITECTURES = ("StableLmForCausalLM", "StableLmModel")


class Config(DecoderConfig, kw_only=True):
    vocab_size: Size = 50304
    hidden_size: Size = 2560
    intermediate_size: Size = 6912
    max_position_embeddings: Size = 4096
    layer_norm_eps: float = 1e-5
    partial_rotary_factor: float | None = 0.25
    use_qkv_bias: bool = False
    use_parallel_residual: bool = False
    qk_layernorm: bool = False


def describe(config: Config) -> Decoder:
    eps = config.layer_norm_eps

    def layer(name: str, index: int) -> Layer:
        q, k = (f"{name}.self_attn.{part}_layernorm.norms.{{}}" for part in "qk")
        norm = HeadNorm(q, k, eps, "own", is_centered=True) if config.qk_layernorm else None
        attn = attention(
            config, f"{name}.self_attn", bias=config.use_qkv_bias, rope=config.rope(), norm=norm
        )
        attn_norm = layer_norm(config, f"{name}.input_layernorm", eps)
        mlp = gated_mlp(config, f"{name}.mlp")
        if config.use_parallel_residual:
            return ((Branch(attn, attn_norm), Branch(mlp, attn_norm)),)
        mlp_norm = layer_norm(config, f"{name}.post_attention_layernorm", eps)
        return pre_norm(attn, attn_norm, mlp, mlp_norm)

    return decoder(config, layer, layer_norm(config, "model.norm", eps))
