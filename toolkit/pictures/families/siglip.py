"""SigLIP: one picture, resized without regard to its shape."""

from __future__ import annotations

from typing import Any

from toolkit.pictures.families import COMMON_OPTIONS, HALF, INTEGERS
from toolkit.pictures.families.clip import modernize, pack, pads, refusal

__all__ = ["ARGUMENTS", "DEFAULTS", "OPTIONS", "PROCESSORS", "modernize", "pack", "pads", "refusal"]

PROCESSORS = {"SiglipImageProcessor": "siglip"}
DEFAULTS: dict[str, dict[str, Any]] = {"SiglipImageProcessor": HALF}
OPTIONS = COMMON_OPTIONS
ARGUMENTS = INTEGERS
