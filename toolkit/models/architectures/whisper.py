"""Whisper (Radford et al., 2022, arXiv:2212.04356): an encoder of clips, and a decoder."""

from typing import Any, ClassVar

from toolkit.models.audio import AudioEncoder
from toolkit.models.config.model_config import ArchitectureConfig, Size, head_size
from toolkit.models.describe import (
    MLP,
    Attention,
    Branch,
    CrossAttention,
    Decoder,
    Layer,
    Norm,
    Table,
)
from toolkit.models.towers.parts import Block
from toolkit.weights.source import Source

ARCHITECTURES = ("WhisperForConditionalGeneration",)
EPS = 1e-5


class Config(ArchitectureConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "is_encoder_decoder": (True,),
    }

    vocab_size: Size = 51865
    d_model: Size = 384
    num_mel_bins: Size = 80
    encoder_layers: Size = 4
    encoder_attention_heads: Size = 6
    encoder_ffn_dim: Size = 1536
    decoder_layers: Size = 4
    decoder_attention_heads: Size = 6
    decoder_ffn_dim: Size = 1536
    activation_function: str = "gelu"
    max_source_positions: Size = 1500
    max_target_positions: Size = 448
    scale_embedding: bool = False  # changes nothing in Transformers either
    tie_word_embeddings: bool = True
    num_hidden_layers: Size = 4
    """Layers of the decoder. In the file, they are the encoder's again."""
    median_filter_width: Size = 7  # of the weights that word timestamps come from

    def __post_init__(self) -> None:
        super().__post_init__()
        self.num_hidden_layers = self.decoder_layers

    @property
    def hidden_size(self) -> int:
        return self.d_model

    @property
    def num_attention_heads(self) -> int:
        return self.decoder_attention_heads

    @property
    def intermediate_size(self) -> int:
        return self.decoder_ffn_dim

    @property
    def max_position_embeddings(self) -> int:
        return self.max_target_positions


def describe(config: Config) -> Decoder:
    hidden, kind = config.d_model, config.activation_function
    size = head_size(hidden, config.decoder_attention_heads)

    def norm(name: str) -> Norm:
        return Norm(name, hidden, EPS, is_centered=True, has_bias=True)

    def attention(name: str) -> dict[str, Any]:
        sources = {part: Source(f"{name}.{part}_proj") for part in "qv"}
        return {
            **sources,
            "k": Source(f"{name}.k_proj", has_bias=False),
            "out": Source(f"{name}.out_proj"),
        }

    def mlp(name: str, width: int) -> MLP:
        return MLP(width, kind, Source(f"{name}.fc1"), Source(f"{name}.fc2"), bias=True)

    def layer(name: str) -> Layer:
        heads, own, other = config.decoder_attention_heads, f"{name}.self_attn", "encoder_attn"
        given: dict[str, Any] = {"scale": size**-0.5, "bias": True, "out_bias": True}
        reading = CrossAttention(
            heads,
            size,
            **attention(f"{name}.{other}"),
            feature=config.max_source_positions,
            **given,
        )
        return (
            (
                Branch(
                    Attention(heads, heads, size, **attention(own), **given),
                    norm(f"{own}_layer_norm"),
                ),
            ),
            (Branch(reading, norm(f"{name}.{other}_layer_norm")),),
            (Branch(mlp(name, config.decoder_ffn_dim), norm(f"{name}.final_layer_norm")),),
        )

    def block(name: str) -> Block:
        own = attention(f"{name}.self_attn")
        return Block(
            attn_norm=norm(f"{name}.self_attn_layer_norm"),
            qkv=(own["q"], own["k"], own["v"]),
            out=own["out"],
            mlp_norm=norm(f"{name}.final_layer_norm"),
            mlp=mlp(name, config.encoder_ffn_dim),
        )

    head_size(hidden, config.encoder_attention_heads)  # refuses what cannot be split
    encoder, decoder = "model.encoder", "model.decoder"
    return Decoder(
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        max_positions=config.max_target_positions,
        embed=f"{decoder}.embed_tokens",
        layers=[layer(f"{decoder}.layers.{i}") for i in range(config.decoder_layers)],
        layers_name=f"{decoder}.layers",
        norm=norm(f"{decoder}.layer_norm"),
        is_tied=True,
        positions=Table(f"{decoder}.embed_positions", config.max_target_positions),
        unused=("proj_out.",),
        encoder=AudioEncoder(
            num_mels=config.num_mel_bins,
            hidden=hidden,
            num_heads=config.encoder_attention_heads,
            num_rows=config.max_source_positions,
            convolutions=(Source(f"{encoder}.conv1"), Source(f"{encoder}.conv2")),
            positions=f"{encoder}.embed_positions",
            blocks=[block(f"{encoder}.layers.{i}") for i in range(config.encoder_layers)],
            norm=norm(f"{encoder}.layer_norm"),
        ),
    )
