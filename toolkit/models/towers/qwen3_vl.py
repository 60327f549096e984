"""Qwen3-VL's tower (Bai et al., 2025): learned positions, and rows for several layers."""

import math

from toolkit.models.config.model_config import Size
from toolkit.models.describe import Table
from toolkit.models.towers.fields import SeeingConfig
from toolkit.models.towers.parts import Block, Merger, Tower
from toolkit.models.towers.qwen2_vl import (
    NAME,
    QwenConfig,
    centered,
    merge,
    plain_mlp,
    qwen_block,
    qwen_tower,
)

TOWERS: tuple[str, ...] = ()
FAMILY = "qwen2_vl"
SECTIONS = (24, 20, 20)
INTERLEAVED = True

Seeing = SeeingConfig


class Config(QwenConfig, kw_only=True):
    depth: Size = 27
    hidden_size: Size = 1152
    hidden_act: str = "gelu_pytorch_tanh"
    intermediate_size: Size = 4304
    patch_size: Size = 16
    out_hidden_size: Size = 3584
    num_position_embeddings: Size = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            number = self.num_position_embeddings
            raise ValueError(f"vision_config: {number} positions are not those of a square")


def describe(config: Config, _: Seeing) -> Tower:
    def block(name: str) -> Block:
        up, down = f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"
        mlp = plain_mlp(config.intermediate_size, config.hidden_act, up, down)
        return qwen_block(config, name, lambda norm: centered(norm, config.width), mlp)

    def merger(name: str, *, norms_squares: bool) -> Merger:
        size = config.width * (config.spatial_merge_size**2 if norms_squares else 1)
        up, down = f"{name}.linear_fc1", f"{name}.linear_fc2"
        return merge(centered(f"{name}.norm", size), up, down, norms_squares=norms_squares)

    levels = tuple(
        (index, merger(f"{NAME}.deepstack_merger_list.{nth}", norms_squares=True))
        for nth, index in enumerate(config.deepstack_visual_indexes)
    )
    return qwen_tower(
        config,
        block,
        merger(f"{NAME}.merger", norms_squares=False),
        out=config.out_hidden_size,
        bias=True,
        table=Table(f"{NAME}.pos_embed", config.num_position_embeddings),
        levels=levels,
    )
