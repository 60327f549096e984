"""CLIP, as in LLaVA 1.5: one square that is resized and cropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import CLIP, COMMON_OPTIONS, INTEGERS, as_bytes

PROCESSORS = {"CLIPImageProcessor": "clip"}
DEFAULTS: dict[str, dict[str, Any]] = {"CLIPImageProcessor": CLIP}
OPTIONS = COMMON_OPTIONS
ARGUMENTS = INTEGERS


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def pads(fields: Mapping[str, Any]) -> bool:
    """True if the picture is padded to a size, with zeros that are not normalized."""
    return bool(fields.get("do_pad") and fields.get("pad_size"))


def refusal(width: int, height: int) -> str:
    return ""


def pack(outputs: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((height, width), [1, channels, height, width])."""
    values = outputs["pixel_values"]
    return values.shape[2:], values if values.dtype == np.float32 else as_bytes(values)
