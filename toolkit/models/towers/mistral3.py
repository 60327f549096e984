"""Mistral Small 3.1's and Ministral 3's tower: Pixtral's (arXiv:2410.07073), and a projector."""

from typing import Any, ClassVar

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm
from toolkit.models.towers.fields import (
    ProjectorConfig,
    TowerConfig,
    axial_rotation,
    require_heads,
)
from toolkit.models.towers.parts import Block, Merger, Patches, Tower
from toolkit.weights.source import Source

NAME, PROJECTOR = "vision_tower", "multi_modal_projector"  # of its tensors
TOWERS = ("", "pixtral")
FAMILY = "pixtral"
SECTIONS: tuple[int, ...] = ()
INTERLEAVED = False
_EPS = 1e-5


class Config(TowerConfig, kw_only=True):
    fixed: ClassVar[dict[str, tuple[object, ...]]] = {"num_channels": (3,)}

    hidden_size: Size = 1024
    intermediate_size: Size = 4096
    num_hidden_layers: Size = 24
    num_attention_heads: Size = 16
    head_dim: Size | None = None
    patch_size: Size = 16
    hidden_act: str = "gelu"
    rope_parameters: dict[str, Any] | None = None
    rope_theta: float | None = None
    """Older place of a value of `rope_parameters`."""

    image_size: Any = None
    vocab_size: Any = None
    """Fields that change nothing: the image processor limits sizes."""

    def __post_init__(self) -> None:
        require_heads(self.hidden_size, self.num_attention_heads, 4)
        size = self.hidden_size // self.num_attention_heads
        if self.head_dim not in (None, size):
            raise ValueError(
                f"vision_config: head_dim is {self.head_dim}, and tk supports hidden_size / "
                f"num_attention_heads ({size})"
            )


class Seeing(ProjectorConfig, kw_only=True):
    image_token_index: int | None = 10
    multimodal_projector_bias: bool = False
    spatial_merge_size: Size = 2


def describe(config: Config, seeing: Seeing) -> Tower:
    def norm(name: str) -> Norm:
        return Norm(name, config.hidden_size, _EPS)

    def block(name: str) -> Block:
        q, k, v, out = (Source(f"{name}.attention.{part}_proj") for part in "qkvo")
        gate, up, down = (
            Source(f"{name}.feed_forward.{part}_proj") for part in ("gate", "up", "down")
        )
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, gate)
        before = norm(f"{name}.attention_norm"), norm(f"{name}.ffn_norm")
        return Block(before[0], (q, k, v), out, before[1], mlp, qkv_bias=False, out_bias=False)

    taps = seeing.taps(config.num_hidden_layers)
    if len(taps) > 1:
        raise ValueError(f"vision_feature_layer is {list(taps)}, and tk supports one for mistral3")
    layers, out = f"{NAME}.transformer.layers", seeing.decoder.hidden_size
    return Tower(
        hidden=config.hidden_size,
        num_heads=config.num_attention_heads,
        out=out,
        patches=Patches(Source(f"{NAME}.patch_conv"), config.patch_size),
        blocks=[block(f"{layers}.{index}") for index in range(taps[0])],
        merger=Merger(
            Norm(f"{PROJECTOR}.norm", config.hidden_size, seeing.decoder.rms_norm_eps),
            Source(f"{PROJECTOR}.linear_1"),
            Source(f"{PROJECTOR}.linear_2"),
            seeing.projector_hidden_act,
            size=out,
            bias=seeing.multimodal_projector_bias,
            shrink=Source(f"{PROJECTOR}.patch_merger.merging_layer"),
        ),
        merge=seeing.spatial_merge_size,
        norm=norm(f"{NAME}.ln_pre"),
        rotation=axial_rotation(config.rope_parameters, config.rope_theta, takes_turns=True),
        unused=tuple(f"{layers}.{index}." for index in range(taps[0], config.num_hidden_layers)),
    )
