"""Command R (Cohere, 2024): attention and MLP in parallel, interleaved rotation, scaled logits."""

from typing import Any, ClassVar

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import Branch, Decoder, Head, HeadNorm, Layer
from toolkit.models.parts import attention, decoder, gated_mlp, interleaved, layer_norm
from toolkit.weights.source import pairs_apart

ARCHITECTURES = ("CohereForCausalLM", "CohereModel")


class Config(DecoderConfig, kw_only=True):
    default_theta: ClassVar[float] = 500000.0

    vocab_size: Size = 256000
    hidden_size: Size = 8192
    intermediate_size: Size = 22528
    num_hidden_layers: Size = 40
    num_attention_heads: Size = 64
    max_position_embeddings: Size = 8192
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    attention_bias: bool = False
    use_qk_norm: bool = False
    tie_word_embeddings: bool = True


def describe(config: Config) -> Decoder:
    eps, order = config.layer_norm_eps, pairs_apart(config.head_dim or 0)

    def layer(name: str, index: int) -> Layer:
        q, k = (f"{name}.self_attn.{part}_norm" for part in "qk")
        norm = HeadNorm(q, k, eps, "own", is_centered=True, order=order)
        given = {"norm": norm if config.use_qk_norm else None}
        return cohere_layer(config, name, rope=config.rope(), **given)

    return cohere_decoder(config, layer)


def cohere_layer(config: Any, name: str, **options: Any) -> Layer:
    """Describe a layer of attention and MLP after one norm. `options`: fields of `Attention`."""
    bias, path = config.attention_bias, f"{name}.self_attn"
    attn = attention(config, path, bias=bias, out_bias=bias, **interleaved(config, path), **options)
    norm = layer_norm(config, f"{name}.input_layernorm", config.layer_norm_eps, has_bias=False)
    return ((Branch(attn, norm), Branch(gated_mlp(config, f"{name}.mlp"), norm)),)


def cohere_decoder(config: Any, layer: Any) -> Decoder:
    norm = layer_norm(config, "model.norm", config.layer_norm_eps, has_bias=False)
    return decoder(config, layer, norm, head=Head(scale=config.logit_scale))
