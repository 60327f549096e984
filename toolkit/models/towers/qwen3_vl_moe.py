"""The tower of Qwen3-VL with experts, which is that of the dense models."""

from toolkit.models.towers.qwen3_vl import (
    FAMILY,
    INTERLEAVED,
    SECTIONS,
    TOWERS,
    Config,
    Seeing,
    describe,
)

__all__ = ["FAMILY", "INTERLEAVED", "SECTIONS", "TOWERS", "Config", "Seeing", "describe"]
