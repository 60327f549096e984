"""The tower of SmolVLM 2 (arXiv:2504.05299), which is that of Idefics 3."""

from toolkit.models.towers.idefics3 import (
    FAMILY,
    INTERLEAVED,
    SECTIONS,
    TOWERS,
    Config,
    Seeing,
    describe,
)

__all__ = ["FAMILY", "INTERLEAVED", "SECTIONS", "TOWERS", "Config", "Seeing", "describe"]
