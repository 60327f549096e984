"""Numbers of tokens that stand for a picture, from its size alone. Imports nothing heavy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from toolkit.errors import InvalidParamError

if TYPE_CHECKING:
    from toolkit.pictures.settings import ProcessorSettings

Grid = tuple[int, int]  # rows and columns of tokens


def token_grid(settings: ProcessorSettings, width: int, height: int, param: str) -> Grid:
    """Return the tokens of a picture. Raises InvalidParamError if it cannot be resized."""
    return _GRIDS[settings.family][0](settings.fields, width, height, param)


def largest_grid(settings: ProcessorSettings) -> Grid:
    """Return the most tokens that a picture can have."""
    return _GRIDS[settings.family][1](settings.fields)


def _qwen_fields(fields: dict[str, Any]) -> tuple[int, int, int]:
    """Return (pixels of a token's side, fewest and most pixels of a picture)."""
    side = fields.get("patch_size", 14) * fields.get("merge_size", 2)
    size = fields.get("size") or {}
    fewest, most = size.get("shortest_edge", 56 * 56), size.get("longest_edge", 28 * 28 * 1280)
    return side, fewest, most


def _qwen_grid(fields: dict[str, Any], width: int, height: int, param: str) -> Grid:
    """Resize to multiples of a token's side, within the fewest and the most pixels.

    As `smart_resize` of Transformers' qwen2_vl."""
    if max(width, height) > 200 * min(width, height):
        raise InvalidParamError(
            param,
            f"is a picture of {width} x {height} pixels: the longer side may be at most 200 times "
            f"the shorter.",
        )
    side, fewest, most = _qwen_fields(fields)
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows = max(1, math.floor(height / shrink / side))
        columns = max(1, math.floor(width / shrink / side))
    elif rows * columns * side**2 < fewest:
        grow = math.sqrt(fewest / (height * width))
        rows, columns = math.ceil(height * grow / side), math.ceil(width * grow / side)
    return rows, columns


def _qwen_largest(fields: dict[str, Any]) -> Grid:
    side, fewest, most = _qwen_fields(fields)
    rows = max(1, math.isqrt(max(fewest, most) // side**2))
    return rows, max(1, max(fewest, most) // side**2 // rows)


_GRIDS = {"qwen2_vl": (_qwen_grid, _qwen_largest)}
