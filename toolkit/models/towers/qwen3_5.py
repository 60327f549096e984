"""Qwen3.5's tower (Qwen Team, 2026): Qwen3-VL's, with rows for the first layer alone."""

from toolkit.models.towers import qwen3_vl
from toolkit.models.towers.parts import Tower

TOWERS: tuple[str, ...] = ()
FAMILY = "qwen2_vl"
SECTIONS = (11, 11, 10)
INTERLEAVED = True

Seeing = qwen3_vl.Seeing


class Config(qwen3_vl.Config, kw_only=True):
    deepstack_visual_indexes: tuple[int, ...] = ()


def describe(config: Config, seeing: Seeing) -> Tower:
    return qwen3_vl.describe(config, seeing)
