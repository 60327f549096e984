"""GPT-2 (Radford et al., 2019)."""

from collections.abc import Sequence
from typing import Any

from toolkit.models.config.model_config import ArchitectureConfig, Size, head_size, require
from toolkit.models.describe import MLP, Attention, Decoder, Layer, Table
from toolkit.models.parts import decoder, layer_norm, pre_norm
from toolkit.weights.source import RowOrder, Source, consecutive

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2Model")


class Config(ArchitectureConfig, kw_only=True):
    vocab_size: Size = 50257
    n_positions: Size = 1024
    n_embd: Size = 768
    n_layer: Size = 12
    n_head: Size = 12
    n_inner: Size | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True

    hidden_size: Size | None = None
    max_position_embeddings: Size | None = None
    num_attention_heads: Size | None = None
    num_hidden_layers: Size | None = None
    """Other kinds' names for n_embd, n_positions, n_head and n_layer. These win."""
    has_linear_layout: bool = False  # weights are [out, in], as GGUF stores them

    def __post_init__(self) -> None:
        super().__post_init__()
        self.hidden_size = self.n_embd = self.hidden_size or self.n_embd
        self.max_position_embeddings = self.n_positions = (
            self.max_position_embeddings or self.n_positions
        )
        self.num_attention_heads = self.n_head = self.num_attention_heads or self.n_head
        self.num_hidden_layers = self.n_layer = self.num_hidden_layers or self.n_layer
        head_size(self.hidden_size, self.num_attention_heads)

    @property
    def max_positions(self) -> int:
        return self.n_positions


def describe(config: Config) -> Decoder:
    require(config, add_cross_attention=(False,))
    width = config.n_embd
    order, transpose = consecutive(width, width, width), not config.has_linear_layout
    return gpt2_decoder(config, config.n_head, order, transpose=transpose)


def gpt2_decoder(
    config: Any, num_kv_heads: int, order: Sequence[RowOrder], *, transpose: bool = False
) -> Decoder:
    """Describe a decoder with GPT-2's names. `order`: of q, k and v in their tensor."""
    hidden, heads, eps = config.n_embd, config.n_head, config.layer_norm_epsilon
    size = hidden // heads

    def layer(name: str, index: int) -> Layer:
        scale = size**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        q, k, v = (Source(f"{name}.attn.c_attn", part, transpose) for part in order)
        out, up, down = (
            Source(f"{name}.{part}", transpose=transpose)
            for part in ("attn.c_proj", "mlp.c_fc", "mlp.c_proj")
        )
        return pre_norm(
            Attention(heads, num_kv_heads, size, q, k, v, out, scale, bias=True, out_bias=True),
            layer_norm(config, f"{name}.ln_1", eps),
            MLP(config.n_inner or 4 * hidden, config.activation_function, up, down, bias=True),
            layer_norm(config, f"{name}.ln_2", eps),
        )

    return decoder(
        config,
        layer,
        layer_norm(config, "transformer.ln_f", eps),
        embed="transformer.wte",
        layers_name="transformer.h",
        positions=Table("transformer.wpe", config.n_positions),
    )
