"""LFM2 (Liquid AI, 2025): gated short convolutions, attention in some layers."""

from collections.abc import Callable
from typing import Any, ClassVar

from toolkit.models.config.model_config import DecoderConfig, Size
from toolkit.models.describe import MLP, Decoder, HeadNorm, Layer, Mix, ShortConvolution
from toolkit.models.parts import attention, decoder, pre_norm, rms_norm
from toolkit.weights.source import Source, consecutive

ARCHITECTURES = ("Lfm2ForCausalLM",)
CONVOLUTION, FULL = "conv", "full_attention"


class Lfm2Fields(DecoderConfig, kw_only=True):
    """Fields of LFM2 with experts and without."""

    default_theta: ClassVar[float] = 1e6

    vocab_size: Size = 65536
    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 128000
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    tie_embedding: bool | None = None  # old spelling of `tie_word_embeddings`; read that
    conv_bias: bool = False
    conv_L_cache: Size = 3  # noqa: N815  (its name in the file)
    layer_types: list[str] | None = None
    """`conv` or `full_attention` for each layer. None: all have attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is None:
            self.layer_types = [FULL] * self.num_hidden_layers
        self.rms_norm_eps = self.norm_eps
        if self.tie_embedding is not None:
            self.tie_word_embeddings = self.tie_embedding
        if unknown := sorted(set(self.layer_types) - {CONVOLUTION, FULL}):
            raise ValueError(f"unsupported layer_types: {', '.join(unknown)}")
        if len(self.layer_types) != self.num_hidden_layers:
            number = len(self.layer_types)
            raise ValueError(
                f"layer_types has {number} entries for {self.num_hidden_layers} layers"
            )
        if self.conv_L_cache < 2:
            raise ValueError("conv_L_cache is 1, and tk supports 2 and more")


class Config(Lfm2Fields, kw_only=True):
    hidden_size: Size = 2560
    intermediate_size: Size = 12288
    block_ff_dim: Size | None = None  # old spelling of `intermediate_size`; read that
    block_multiple_of: Size = 256
    block_ffn_dim_multiplier: float | None = 1.0
    block_auto_adjust_ff_dim: bool = True
    """The MLP has two thirds of `intermediate_size`, times `block_ffn_dim_multiplier`, rounded up
    to a multiple of `block_multiple_of`."""
    full_attn_idxs: list[int] | None = None
    """Layers with attention. Not read if `layer_types` is given."""

    def __post_init__(self) -> None:
        if self.layer_types is None:
            layers = range(self.num_hidden_layers)
            full = set(layers if self.full_attn_idxs is None else self.full_attn_idxs)
            self.layer_types = [FULL if index in full else CONVOLUTION for index in layers]
        super().__post_init__()
        self.intermediate_size = self.block_ff_dim or self.intermediate_size

    @property
    def mlp_size(self) -> int:
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        size, multiple = int(2 * self.intermediate_size / 3), self.block_multiple_of
        if self.block_ffn_dim_multiplier is not None:
            size = int(self.block_ffn_dim_multiplier * size)
            size = -(-size // multiple) * multiple
        return size


def describe(config: Config) -> Decoder:
    return lfm2_decoder(config, lambda name, _: mlp(name, config.mlp_size))


def lfm2_decoder(config: Any, feed_forward: Callable[[str, int], Mix]) -> Decoder:
    """Describe a decoder. feed_forward(name, index): what follows attention or a convolution."""

    def layer(name: str, index: int) -> Layer:
        is_full = config.layer_types[index] == FULL
        return pre_norm(
            _attention(config, f"{name}.self_attn") if is_full else _convolution(config, name),
            rms_norm(config, f"{name}.operator_norm"),
            feed_forward(f"{name}.feed_forward", index),
            rms_norm(config, f"{name}.ffn_norm"),
        )

    return decoder(config, layer, rms_norm(config, "model.embedding_norm"))


def mlp(name: str, size: int) -> MLP:
    """Describe an MLP with projections named w1 (gate), w3 (up) and w2 (down)."""
    gate, down, up = (Source(f"{name}.w{number}") for number in (1, 2, 3))
    return MLP(size, "silu", up, down, gate)


def _attention(config: Any, name: str) -> Mix:
    norm = HeadNorm(f"{name}.q_layernorm", f"{name}.k_layernorm", config.norm_eps)
    return attention(config, name, output="out_proj", rope=config.rope(), norm=norm)


def _convolution(config: Any, name: str) -> Mix:
    size = config.hidden_size
    b, c, x = (Source(f"{name}.conv.in_proj", order) for order in consecutive(size, size, size))
    return ShortConvolution(
        size=size,
        width=config.conv_L_cache,
        b=b,
        c=c,
        x=x,
        out=Source(f"{name}.conv.out_proj"),
        convolution=f"{name}.conv.conv",
        bias=config.conv_bias,
    )
