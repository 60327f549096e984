"""InternVL: tiles in rows and columns that fit the picture's shape, and a thumbnail."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import (
    CLIP,
    COMMON_OPTIONS,
    INTEGERS,
    Grid,
    Settings,
    TileTexts,
    as_bytes,
    in_squares,
)

PROCESSORS = {"GotOcr2ImageProcessor": "got_ocr2"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "GotOcr2ImageProcessor": CLIP
    | {"size": {"height": 384, "width": 384}, "min_patches": 1, "max_patches": 12}
}
OPTIONS = COMMON_OPTIONS | {"max_patches", "min_patches"}
OWN_ARGUMENTS = {"crop_to_patches": True}
ARGUMENTS = INTEGERS | OWN_ARGUMENTS
ENDS: dict[str, str] = {}
TILES = TileTexts(
    tokens={"start_image_token": "<img>", "end_image_token": "</img>"},
    start="{start_image_token}",
    end="{end_image_token}",
)


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def fit(patch_size: int, merge: int) -> dict[str, Any]:
    return {}


def pads(fields: Mapping[str, Any]) -> bool:
    return False


def problem(settings: Settings) -> str:
    fields = settings.fields
    if not fields.get("do_resize", True):
        return "do_resize is false, and tk supports pictures that are resized"
    size = fields["size"] if isinstance(fields["size"], dict) else {}
    side = size.get("height")
    if not isinstance(side, int) or size.get("width") != side:
        return f"size is {fields['size']!r}, and tk supports an equal height and width"
    for name in ("min_patches", "max_patches"):
        if not isinstance(fields[name], int) or fields[name] < 1:
            return f"{name} is {fields[name]!r}, which must be a number from 1 on"
    patches = side // settings.patch_size
    if not patches or patches % settings.merge:
        return (
            f"a tile of {side} pixels has {patches} patches on a side, which must be a multiple of "
            f"{settings.merge}"
        )
    return ""


def refusal(settings: Settings, width: int, height: int) -> str:
    return ""


def token_grid(settings: Settings, width: int, height: int) -> Grid:
    (rows, columns), (down, across) = tile_grid(settings), _num_tiles(settings, width, height)
    return rows * down, columns * across


def largest_grid(settings: Settings) -> Grid:
    rows, columns = tile_grid(settings)
    most = _shapes(settings.fields["min_patches"], settings.fields["max_patches"])
    return rows, columns * max((across * down for across, down in most), default=1)


def tile_grid(settings: Settings) -> Grid:
    side = settings.fields["size"]["height"] // (settings.patch_size * settings.merge)
    return side, side


def pack(
    settings: Settings, outputs: Mapping[str, np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((tiles, rows, columns) of patches, [patches, channels * patch * patch])."""
    tiles = outputs["pixel_values"]
    (rows, columns), merge = tile_grid(settings), settings.merge
    patches = [in_squares(tile, settings.patch_size, merge) for tile in tiles]
    return (len(tiles), rows * merge, columns * merge), as_bytes(np.concatenate(patches))


def _num_tiles(settings: Settings, width: int, height: int) -> Grid:
    """Return the rows and columns of tiles whose shape is nearest to the picture's.

    Of equal shapes, the first one, or a later one of less than twice the picture's pixels. As
    `get_optimal_tiled_canvas` of Transformers' got_ocr2."""
    fields, ratio = settings.fields, width / height
    side, best, least = fields["size"]["height"], (1, 1), float("inf")
    for across, down in _shapes(fields["min_patches"], fields["max_patches"]):
        away = abs(ratio - across / down)
        is_filled = width * height > 0.5 * side * side * across * down
        if away < least or (away == least and is_filled):
            best, least = (down, across), away
    return best


@functools.cache
def _shapes(fewest: int, most: int) -> list[Grid]:
    """Return (columns, rows) of so many tiles, fewest first. One tile if more are not allowed."""
    if most == 1:
        return [(1, 1)]
    counts = range(1, most + 1)
    found = [(x, y) for x in counts for y in counts if fewest <= x * y <= most]
    return sorted(found, key=lambda shape: shape[0] * shape[1])
