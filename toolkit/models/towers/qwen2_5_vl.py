"""Qwen2.5-VL's tower (Bai et al., 2025): windows in most blocks, RMS norms and gated MLPs."""

from dataclasses import replace

from toolkit.models.config.model_config import Size
from toolkit.models.describe import MLP, Norm
from toolkit.models.towers.fields import SeeingConfig
from toolkit.models.towers.parts import Block, Tower
from toolkit.models.towers.qwen2_vl import NAME, QwenConfig, merge, qwen_block, qwen_tower
from toolkit.weights.source import Source

TOWERS: tuple[str, ...] = ()
FAMILY = "qwen2_vl"
SECTIONS = (16, 24, 24)
INTERLEAVED = False

Seeing = SeeingConfig


class Config(QwenConfig, kw_only=True):
    hidden_act: str = "silu"
    intermediate_size: Size = 3420
    window_size: Size = 112  # pixels
    out_hidden_size: Size = 3584
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)


def describe(config: Config, _: Seeing) -> Tower:
    def norm(name: str) -> Norm:
        return Norm(name, config.width, 1e-6)

    def block(name: str) -> Block:
        gate, up, down = (Source(f"{name}.mlp.{part}_proj") for part in ("gate", "up", "down"))
        mlp = MLP(config.intermediate_size, config.hidden_act, up, down, gate, bias=True)
        windowed = int(name.rpartition(".")[2]) not in config.fullatt_block_indexes
        return replace(qwen_block(config, name, norm, mlp), is_windowed=windowed)

    name = f"{NAME}.merger"
    return qwen_tower(
        config,
        block,
        merge(norm(f"{name}.ln_q"), f"{name}.mlp.0", f"{name}.mlp.2"),
        out=config.out_hidden_size,
        window=config.window_size // config.spatial_merge_size // config.patch_size,
    )
