"""The tower of Qwen3.5 with experts, which is that of the dense models."""

from toolkit.models.towers.qwen3_5 import (
    FAMILY,
    INTERLEAVED,
    SECTIONS,
    TOWERS,
    Config,
    Seeing,
    describe,
)

__all__ = ["FAMILY", "INTERLEAVED", "SECTIONS", "TOWERS", "Config", "Seeing", "describe"]
