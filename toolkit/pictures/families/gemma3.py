"""Gemma 3: one picture, resized without regard to its shape, and no crops of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.pictures.families import COMMON_OPTIONS, HALF, INTEGERS
from toolkit.pictures.families.clip import modernize, pack, refusal

__all__ = ["ARGUMENTS", "DEFAULTS", "OPTIONS", "PROCESSORS", "modernize", "pack", "pads", "refusal"]

PROCESSORS = {"Gemma3ImageProcessor": "gemma3"}
DEFAULTS: dict[str, dict[str, Any]] = {"Gemma3ImageProcessor": HALF}
OPTIONS = COMMON_OPTIONS
ARGUMENTS = INTEGERS | {"do_pan_and_scan": False}


def pads(fields: Mapping[str, Any]) -> bool:
    return False
