"""Qwen2-VL, 2.5-VL and 3-VL: patches of 14 or 16 pixels, in the order of the tower's merger.

The processor repeats a still picture for each of `temporal_patch_size` frames. Only one travels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import CLIP, COMMON_OPTIONS, INTEGERS, as_bytes

PROCESSORS = {"Qwen2VLImageProcessor": "qwen2_vl"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "Qwen2VLImageProcessor": CLIP
    | {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}},  # in pixels
}
OPTIONS = COMMON_OPTIONS | {"max_pixels", "merge_size", "min_pixels", "patch_size"}
OPTIONS |= {"temporal_patch_size"}
ARGUMENTS = INTEGERS | {"temporal_patch_size": 1}
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


def pads(fields: Mapping[str, Any]) -> bool:
    return False


def refusal(width: int, height: int) -> str:
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
    channels, height, width = image.shape
    rows, columns = height // patch_size, width // patch_size
    sides = rows // merge_size, merge_size, patch_size
    across = columns // merge_size, merge_size, patch_size
    parts = image.reshape(channels, *sides, *across).transpose(1, 4, 2, 5, 0, 3, 6)
    return parts.reshape(rows * columns, -1), rows, columns


def pack(outputs: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((1, rows, columns), [patches, channels * patch * patch])."""
    (grid,) = outputs["image_grid_thw"]
    return tuple(int(size) for size in grid), as_bytes(outputs["pixel_values"])
