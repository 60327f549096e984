"""Find the tower for clips of a model whose prompts have them as tokens. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from toolkit.models.audio import SoundTower
from toolkit.models.config.model_config import ArchitectureConfig, Size, head_size
from toolkit.models.config.unread import find_unknown
from toolkit.models.describe import MLP, Norm
from toolkit.models.towers.parts import Block
from toolkit.weights.source import Source

TOWER, PROJECTOR = "model.audio_tower", "multi_modal_projector"  # of tensors
EPS = 1e-5


@dataclass(frozen=True, slots=True)
class Sound:
    """A model's tower for clips, and the token that stands for a row."""

    tower: SoundTower
    token_id: int


class Config(msgspec.Struct, kw_only=True):
    """The field `audio_config`."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {}
    model_type: str = "qwen3_asr_encoder"
    num_mel_bins: Size = 128
    encoder_layers: Size = 24
    encoder_attention_heads: Size = 16
    encoder_ffn_dim: Size = 4096
    d_model: Size = 1024
    activation_function: str = "gelu"
    scale_embedding: bool = False  # changes nothing in Transformers either
    n_window: Size = 50
    n_window_infer: Size = 800
    output_dim: Size = 3584
    downsample_hidden_size: Size = 480
    max_position_embeddings: Size = 13
    # Change nothing, in Qwen's own config.json
    conv_chunksize: Size = 500
    max_source_positions: Size = 1500
    num_hidden_layers: Size = 24

    def __post_init__(self) -> None:
        head_size(self.d_model, self.encoder_attention_heads)  # refuses what cannot be split
        if self.n_window != 50:
            raise ValueError(f"n_window is {self.n_window}: tk supports 50")
        if self.n_window_infer % (2 * self.n_window):
            raise ValueError(
                f"n_window_infer ({self.n_window_infer}) is not a multiple of 2 n_window"
            )


def find_sound(raw: Mapping[str, Any], decoder: ArchitectureConfig) -> Sound | None:
    """Return the tower of a config.json; None if tk runs none. decoder: the parsed text_config.

    Raises ValueError for a value of the wrong type, or an unsupported feature."""
    given = raw.get("audio_config")
    if raw.get("model_type") != "qwen3_asr" or not isinstance(given, dict):
        return None
    if (unknown := find_unknown(given, Config)) is not None:
        raise ValueError(f"audio_config: {unknown}")
    try:
        config = msgspec.convert(given, Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"audio_config: {error}".replace("`$.", "`")) from None
    token = raw.get("audio_token_id", 151676)
    if not isinstance(token, int) or not 0 <= token < decoder.vocab_size:
        raise ValueError(f"its audio_token_id is {token!r}, not a token")
    out = getattr(decoder, "hidden_size", config.output_dim)
    if config.output_dim != out:
        raise ValueError(
            f"audio_config: output_dim ({config.output_dim}) is not the decoder's size ({out})"
        )
    return Sound(_describe(config), token)


def _describe(config: Config) -> SoundTower:
    hidden, kind = config.d_model, config.activation_function

    def norm(name: str) -> Norm:
        return Norm(name, hidden, EPS, is_centered=True, has_bias=True)

    def block(name: str) -> Block:
        q, k, v, out = (Source(f"{name}.self_attn.{part}_proj") for part in ("q", "k", "v", "out"))
        up, down = Source(f"{name}.fc1"), Source(f"{name}.fc2")
        return Block(
            attn_norm=norm(f"{name}.self_attn_layer_norm"),
            qkv=(q, k, v),
            out=out,
            mlp_norm=norm(f"{name}.final_layer_norm"),
            mlp=MLP(config.encoder_ffn_dim, kind, up, down, bias=True),
        )

    return SoundTower(
        num_mels=config.num_mel_bins,
        channels=config.downsample_hidden_size,
        hidden=hidden,
        num_heads=config.encoder_attention_heads,
        out=config.output_dim,
        chunk=2 * config.n_window,
        window=config.n_window_infer,
        most_rows=config.max_position_embeddings,
        activation=kind,
        convolutions=tuple(Source(f"{TOWER}.conv2d{n}") for n in (1, 2, 3)),
        flat=Source(f"{TOWER}.conv_out"),
        blocks=[block(f"{TOWER}.layers.{i}") for i in range(config.encoder_layers)],
        norm=norm(f"{TOWER}.ln_post"),
        projection=(Source(f"{PROJECTOR}.linear_1"), Source(f"{PROJECTOR}.linear_2")),
    )
