"""Qwen2-VL, 2.5-VL and 3-VL: patches of 14 or 16 pixels, in the order of the tower's merger.

The processor repeats a still picture for each of `temporal_patch_size` frames. Only one travels."""

from __future__ import annotations

import math
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

PROCESSORS = {"Qwen2VLImageProcessor": "qwen2_vl"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLImageProcessor": CLIP
    | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},  # in pixels
}
OPTIONS = COMMON_OPTIONS | {"max_pixels", "merge_size", "min_pixels", "patch_size"}
OPTIONS |= {"temporal_patch_size"}
OWN_ARGUMENTS: dict[str, Any] = {}
ARGUMENTS = INTEGERS | {"temporal_patch_size": 1}
ENDS: dict[str, str] = {}
TILES = None
MAX_RATIO = 200  # of the sides, in Transformers


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    """Replace min_pixels and max_pixels, alone or in `size`, by the edges that mean them now.

    Raises ValueError."""
    fields = dict(fields)
    size = fields.pop("size", None) or {}
    if not isinstance(size, dict):
        raise ValueError(f"size must be an object, not {size!r}")
    size = dict(size)
    for old, new in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        inner, outer = size.pop(old, None), fields.pop(old, None)
        if (value := inner if outer is None else outer) is not None:
            size[new] = value
    return fields | ({"size": size} if size else {})


def fit(patch_size: int, merge: int) -> dict[str, Any]:
    return {}


def pads(fields: Mapping[str, Any]) -> bool:
    return False


def problem(settings: Settings) -> str:
    given, wanted = _sides(settings), (settings.patch_size, settings.merge)
    if given == wanted:
        return ""
    return f"patch_size and merge_size are {given}, and those of the tower {wanted}"


def refusal(settings: Settings, width: int, height: int) -> str:
    if max(width, height) <= MAX_RATIO * min(width, height):
        return ""
    return (
        f"is a picture of {width} x {height} pixels: the longer side may be at most {MAX_RATIO} "
        "times the shorter"
    )


def patchify(
    _self: object, image: np.ndarray, patch_size: int, merge_size: int, temporal_patch_size: int
) -> tuple[np.ndarray, int, int]:
    """Replace the processor's method of this name, which converts bytes to fp32 first.

    Returns ([patches, channels * patch * patch], rows, columns)."""
    _, height, width = image.shape
    rows, columns = height // patch_size, width // patch_size
    return in_squares(image, patch_size, merge_size), rows, columns


def token_grid(settings: Settings, width: int, height: int) -> Grid:
    """Resize to multiples of a token's side, within the fewest and the most pixels.

    As `smart_resize` of Transformers' qwen2_vl."""
    side, fewest, most = _limits(settings)
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif rows * columns * side**2 < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return rows, columns


def largest_grid(settings: Settings) -> Grid:
    side, fewest, most = _limits(settings)
    rows = max(1, math.isqrt(max(fewest, most) // side**2))
    return rows, max(1, max(fewest, most) // side**2 // rows)


tile_grid = largest_grid


def _limits(settings: Settings) -> tuple[int, int, int]:
    """Return (pixels of a token's side, fewest and most pixels of a picture)."""
    patch_size, merge = _sides(settings)
    size = settings.fields.get("size") or {}
    fewest, most = size.get("shortest_edge", 56 * 56), size.get("longest_edge", 28 * 28 * 1280)
    return patch_size * merge, fewest, most


def _sides(settings: Settings) -> tuple[int, int]:
    return settings.fields.get("patch_size", 14), settings.fields.get("merge_size", 2)


def pack(
    settings: Settings, outputs: Mapping[str, np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((1, rows, columns), [patches, channels * patch * patch])."""
    (grid,) = outputs["image_grid_thw"]
    return tuple(int(size) for size in grid), as_bytes(outputs["pixel_values"])
