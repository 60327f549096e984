"""CLIP, as in LLaVA 1.5: one square that is resized and cropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import (
    CLIP,
    COMMON_OPTIONS,
    INTEGERS,
    Grid,
    Settings,
    as_bytes,
    in_squares,
)

PROCESSORS = {"CLIPImageProcessor": "clip"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIPImageProcessor": CLIP
    | {
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
        "size": {"shortest_edge": 224},
    }
}
OPTIONS = COMMON_OPTIONS
OWN_ARGUMENTS: dict[str, Any] = {}
ARGUMENTS = INTEGERS
ENDS: dict[str, str] = {}
TILES = None


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace sizes that are one number. Raises ValueError."""
    fields = dict(fields)
    for name, sides in (("size", ("shortest_edge",)), ("crop_size", ("height", "width"))):
        value = fields.get(name, {})
        if isinstance(value, int):
            fields[name] = dict.fromkeys(sides, value)
        elif not isinstance(value, dict):
            raise ValueError(f"{name} must be a number or an object, not {value!r}")
    return fields


def fit(patch_size: int, merge: int) -> dict[str, Any]:
    return {}


def pads(fields: Mapping[str, Any]) -> bool:
    """True if the picture is padded to a size, with zeros that are not normalized."""
    return bool(fields.get("do_pad") and fields.get("pad_size"))


def problem(settings: Settings) -> str:
    if pads(settings.fields):
        return "tk does not support do_pad with pad_size"
    if _sides(settings) is None:
        return "pictures must have one size: that of do_center_crop, or a height and a width"
    return ""


def refusal(settings: Settings, width: int, height: int) -> str:
    return ""


def token_grid(settings: Settings, width: int, height: int) -> Grid:
    return largest_grid(settings)


def largest_grid(settings: Settings) -> Grid:
    sides, side = _sides(settings), settings.patch_size * settings.merge
    assert sides is not None, "`problem` was asked"
    return sides[0] // side, sides[1] // side


tile_grid = largest_grid


def _sides(settings: Settings) -> tuple[int, int] | None:
    """Return height and width of every picture; None if they depend on the picture."""
    fields = settings.fields
    if fields.get("do_center_crop"):
        found = fields.get("crop_size") or {}
    else:
        found = (fields.get("size") or {}) if fields.get("do_resize", True) else {}
    height, width = found.get("height"), found.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None


def pack(
    settings: Settings, outputs: Mapping[str, np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((rows, columns) of patches, [patches, channels * patch * patch])."""
    (values,) = outputs["pixel_values"]
    side, merge = settings.patch_size * settings.merge, settings.merge
    grid = values.shape[1] // side * merge, values.shape[2] // side * merge
    patches = in_squares(values, settings.patch_size, merge)
    return grid, patches if patches.dtype == np.float32 else as_bytes(patches)
