"""SigLIP: one picture, resized without regard to its shape."""

from __future__ import annotations

from typing import Any

from toolkit.pictures.families import COMMON_OPTIONS, HALF, INTEGERS
from toolkit.pictures.families.clip import (
    ENDS,
    fit,
    largest_grid,
    modernize,
    pack,
    pads,
    problem,
    refusal,
    token_grid,
)

__all__ = [
    "ARGUMENTS",
    "DEFAULTS",
    "ENDS",
    "OPTIONS",
    "PROCESSORS",
    "fit",
    "largest_grid",
    "modernize",
    "pack",
    "pads",
    "problem",
    "refusal",
    "token_grid",
]

PROCESSORS = {"SiglipImageProcessor": "siglip"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "SiglipImageProcessor": HALF | {"size": {"height": 224, "width": 224}}
}
OPTIONS = COMMON_OPTIONS
ARGUMENTS = INTEGERS
