"""Gemma 3: one picture, resized without regard to its shape, and no crops of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.pictures.families import COMMON_OPTIONS, HALF, INTEGERS
from toolkit.pictures.families.clip import (
    ENDS,
    TILES,
    fit,
    largest_grid,
    modernize,
    pack,
    problem,
    refusal,
    tile_grid,
    token_grid,
)

__all__ = [
    "ARGUMENTS",
    "DEFAULTS",
    "ENDS",
    "OPTIONS",
    "OWN_ARGUMENTS",
    "PROCESSORS",
    "TILES",
    "fit",
    "largest_grid",
    "modernize",
    "pack",
    "pads",
    "problem",
    "refusal",
    "tile_grid",
    "token_grid",
]

PROCESSORS = {"Gemma3ImageProcessor": "gemma3"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ImageProcessor": HALF | {"size": {"height": 224, "width": 224}}
}
OPTIONS = COMMON_OPTIONS
OWN_ARGUMENTS: dict[str, Any] = {}
ARGUMENTS = INTEGERS | {"do_pan_and_scan": False}


def pads(fields: Mapping[str, Any]) -> bool:
    return False
