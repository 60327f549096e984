"""Pixtral and Mistral 3: pictures of any shape, whose sides are multiples of the patch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import CLIP, COMMON_OPTIONS, INTEGERS, as_bytes
from toolkit.pictures.families.clip import modernize, refusal

__all__ = ["ARGUMENTS", "DEFAULTS", "OPTIONS", "PROCESSORS", "modernize", "pack", "pads", "refusal"]

PROCESSORS = {"PixtralImageProcessor": "pixtral"}
DEFAULTS: dict[str, dict[str, Any]] = {"PixtralImageProcessor": CLIP}
OPTIONS = COMMON_OPTIONS | {"patch_size"}
ARGUMENTS = INTEGERS


def pads(fields: Mapping[str, Any]) -> bool:
    """False: the processor pads to the largest picture of a call, and a call has one."""
    return False


def pack(outputs: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((rows, columns) of patches, [1, channels, height, width])."""
    values = as_bytes(outputs["pixel_values"])
    rows, columns = np.array(values.shape[2:]) // outputs["patch_size"]
    return (int(rows), int(columns)), values
