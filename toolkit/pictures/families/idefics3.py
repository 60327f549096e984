"""Idefics 3 and SmolVLM: tiles of one size in rows, and a small picture of all of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from toolkit.pictures.families import (
    COMMON_OPTIONS,
    HALF,
    INTEGERS,
    Grid,
    Settings,
    TileTexts,
    as_bytes,
    in_squares,
)

PROCESSORS = {"Idefics3ImageProcessor": "idefics3", "SmolVLMImageProcessor": "smolvlm"}
DEFAULTS: dict[str, dict[str, Any]] = dict.fromkeys(
    PROCESSORS,
    HALF | {"size": {"longest_edge": 4 * 364}, "max_image_size": {"longest_edge": 364}},
)
OPTIONS = COMMON_OPTIONS | {"do_image_splitting", "max_image_size"}
OWN_ARGUMENTS: dict[str, Any] = {}
ARGUMENTS = INTEGERS | {"do_pad": False}
ENDS: dict[str, str] = {}
TILES = TileTexts(
    tokens={"fake_image_token": "<fake_token_around_image>"},
    cell="{fake_image_token}<row_{row}_col_{column}>",
    row_end="\n",
    last="\n\n{fake_image_token}<global-img>",
    alone="{fake_image_token}<global-img>",
    end="{fake_image_token}",
)
MAX_SIDE = 4096  # pixels of a resized picture, in Transformers


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def fit(patch_size: int, merge: int) -> dict[str, Any]:
    return {}


def pads(fields: Mapping[str, Any]) -> bool:
    """False: the processor pads to the largest tile of a call, and all have one size."""
    return False


def problem(settings: Settings) -> str:
    fields = settings.fields
    if not fields.get("do_resize", True):
        return "do_resize is false, and tk supports pictures that are resized"
    for name in ("size", "max_image_size"):
        edges = fields[name]
        if not isinstance(edges, dict) or not isinstance(edges.get("longest_edge"), int):
            return f"{name} is {edges!r}, and tk supports {{'longest_edge': a number}}"
    patches = _tile(settings) // settings.patch_size
    if not patches or patches % settings.merge:
        return (
            f"a tile of {_tile(settings)} pixels has {patches} patches on a side, which must be a "
            f"multiple of {settings.merge}"
        )
    return ""


def refusal(settings: Settings, width: int, height: int) -> str:
    if all(_num_tiles(settings, width, height)):
        return ""
    return (
        f"is a picture of {width} x {height} pixels, which is less than a pixel wide once it is "
        "resized"
    )


def token_grid(settings: Settings, width: int, height: int) -> Grid:
    (rows, columns), (down, across) = tile_grid(settings), _num_tiles(settings, width, height)
    return rows * down, columns * across


def largest_grid(settings: Settings) -> Grid:
    rows, columns = tile_grid(settings)
    longest, tile = settings.fields["size"]["longest_edge"], _tile(settings)
    # The shorter side is rounded up to an even number, which may exceed the longest.
    most = -(-min(longest + longest % 2, MAX_SIDE) // tile) if _splits(settings) else 1
    return rows * most, columns * most


def tile_grid(settings: Settings) -> Grid:
    side = _tile(settings) // (settings.patch_size * settings.merge)
    return side, side


def pack(
    settings: Settings, outputs: Mapping[str, np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray]:
    """Return ((tiles, rows, columns) of patches, [patches, channels * patch * patch])."""
    (tiles,) = outputs["pixel_values"]
    (rows, columns), merge = tile_grid(settings), settings.merge
    patches = [in_squares(tile, settings.patch_size, merge) for tile in tiles]
    return (len(tiles), rows * merge, columns * merge), as_bytes(np.concatenate(patches))


def _tile(settings: Settings) -> int:
    """Return the pixels of a tile's side."""
    side: int = settings.fields["max_image_size"]["longest_edge"]
    return side


def _splits(settings: Settings) -> bool:
    return bool(settings.fields.get("do_image_splitting", True))


def _num_tiles(settings: Settings, width: int, height: int) -> Grid:
    """Return rows and columns of tiles. A picture of none is too narrow.

    As `resize` and `resize_for_vision_encoder` of Transformers' idefics3, in the same order."""
    if not _splits(settings):
        return 1, 1
    tile = _tile(settings)
    width, height = _with_longest(width, height, settings.fields["size"]["longest_edge"])
    if max(width, height) > MAX_SIDE:
        ratio = width / height
        if width >= height:
            width, height = MAX_SIDE, max(1, int(MAX_SIDE / ratio))
        else:
            width, height = max(1, int(MAX_SIDE * ratio)), MAX_SIDE
    ratio = width / height
    if width >= height:
        columns = -(-width // tile)
        return -(-int(columns * tile / ratio) // tile), columns
    rows = -(-height // tile)
    return rows, -(-int(rows * tile * ratio) // tile)


def _with_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Return the size whose longer side is this, and whose shorter side is even."""
    ratio = width / height
    if width >= height:
        short = int(longest / ratio)
        return longest, max(1, short + short % 2)
    short = int(longest * ratio)
    return max(1, short + short % 2), longest
