"""Qwen2-VL's tower (Wang et al., 2024): layer norms, and a rotation by row and column."""

from collections.abc import Callable
from typing import Any, ClassVar

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm
from toolkit.models.towers.fields import (
    SeeingConfig,
    TowerConfig,
    axial_rotation,
    require_heads,
)
from toolkit.models.towers.parts import Block, Merger, Patches, Tower, fused
from toolkit.weights.source import Source

NAME = "model.visual"  # of its tensors

TOWERS: tuple[str, ...] = ()
FAMILY = "qwen2_vl"
SECTIONS = (16, 24, 24)
INTERLEAVED = False

Seeing = SeeingConfig


class QwenConfig(TowerConfig, kw_only=True):
    """Fields of the towers of Qwen2-VL and those that follow it."""

    fixed: ClassVar[dict[str, tuple[object, ...]]] = {
        "in_channels": (3,),
        "in_chans": (3,),
        "spatial_patch_size": (14, 16),
        "tokens_per_second": (2, 4, 25),  # of videos
    }

    depth: Size = 32
    hidden_size: Size = 3584
    num_heads: Size = 16
    patch_size: Size = 14
    spatial_merge_size: Size = 2
    temporal_patch_size: Size = 2
    rope_parameters: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        axial_rotation(self.rope_parameters)
        require_heads(self.width, self.num_heads, 4)

    @property
    def width(self) -> int:
        """Features of a patch."""
        return self.hidden_size


class Config(QwenConfig, kw_only=True):
    embed_dim: Size = 1280
    hidden_act: str = "quick_gelu"
    mlp_ratio: Size = 4

    @property
    def width(self) -> int:
        return self.embed_dim


def describe(config: Config, _: Seeing) -> Tower:
    size = config.width * config.mlp_ratio

    def layer_norm(name: str) -> Norm:
        return centered(name, config.width)

    def block(name: str) -> Block:
        mlp = plain_mlp(size, config.hidden_act, f"{name}.mlp.fc1", f"{name}.mlp.fc2")
        return qwen_block(config, name, layer_norm, mlp)

    name = f"{NAME}.merger"
    merger = merge(layer_norm(f"{name}.ln_q"), f"{name}.mlp.0", f"{name}.mlp.2")
    return qwen_tower(config, block, merger, out=config.hidden_size)


def centered(name: str, size: int) -> Norm:
    return Norm(name, size, 1e-6, is_centered=True, has_bias=True)


def plain_mlp(size: int, activation: str, up: str, down: str) -> MLP:
    return MLP(size, activation, Source(up), Source(down), None, bias=True)


def merge(norm: Norm, up: str, down: str, **options: Any) -> Merger:
    return Merger(norm, Source(up), Source(down), **options)


def qwen_block(config: QwenConfig, name: str, norm: Callable[[str], Norm], mlp: MLP) -> Block:
    return Block(
        norm(f"{name}.norm1"),
        fused(f"{name}.attn.qkv", config.width),
        Source(f"{name}.attn.proj"),
        norm(f"{name}.norm2"),
        mlp,
    )


def qwen_tower(
    config: QwenConfig,
    block: Callable[[str], Block],
    merger: Merger,
    *,
    out: int,
    bias: bool = False,
    **options: Any,
) -> Tower:
    """Describe a tower. `block`: describes one, given its name; `out`: features of a token;
    `bias`: of the first product; `options`: fields of `Tower`."""
    source, frames = Source(f"{NAME}.patch_embed.proj"), config.temporal_patch_size
    patches = Patches(source, config.patch_size, frames=frames, bias=bias)
    given = {
        "hidden": config.width,
        "num_heads": config.num_heads,
        "out": out,
        "patches": patches,
        "blocks": [block(f"{NAME}.blocks.{index}") for index in range(config.depth)],
        "merger": merger,
        "merge": config.spatial_merge_size,
        "rotation": axial_rotation(config.rope_parameters),
        **options,
    }
    return Tower(**given)
