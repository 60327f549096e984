"""Pixtral and Mistral 3: pictures of any shape, whose sides are multiples of a token's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.pictures.families import CLIP, COMMON_OPTIONS, INTEGERS, Grid, Settings
from toolkit.pictures.families.clip import TILES, pack

__all__ = [
    "ARGUMENTS",
    "DEFAULTS",
    "ENDS",
    "OPTIONS",
    "PROCESSORS",
    "TILES",
    "fit",
    "largest_grid",
    "modernize",
    "pack",
    "pads",
    "problem",
    "refusal",
    "tile_grid",
    "token_grid",
]

PROCESSORS = {"PixtralImageProcessor": "pixtral"}
DEFAULTS: dict[str, dict[str, Any]] = {
    "PixtralImageProcessor": CLIP | {"size": {"longest_edge": 1024}}
}
OPTIONS = COMMON_OPTIONS
OWN_ARGUMENTS: dict[str, Any] = {}
ARGUMENTS = INTEGERS
ENDS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]"}


def modernize(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def fit(patch_size: int, merge: int) -> dict[str, Any]:
    """Return the side of a token: Transformers' processor of this name, for the image processor."""
    return {"patch_size": patch_size * merge}


def pads(fields: Mapping[str, Any]) -> bool:
    """False: the processor pads to the largest picture of a call, and a call has one."""
    return False


def problem(settings: Settings) -> str:
    fields = settings.fields
    if not fields.get("do_resize", True) or fields.get("do_center_crop"):
        return "pictures must be resized, and not cropped"
    if _most(settings) is None:
        return "size must have the longest_edge, or a height and a width"
    return ""


def refusal(settings: Settings, width: int, height: int) -> str:
    if all(token_grid(settings, width, height)):
        return ""
    return (
        f"is a picture of {width} x {height} pixels, which is less than a pixel wide once it is "
        "resized"
    )


def token_grid(settings: Settings, width: int, height: int) -> Grid:
    """Shrink to the largest size. Round up to multiples of a token's side.

    As `get_resize_output_image_size` of Transformers' pixtral."""
    most, side = _most(settings), settings.patch_size * settings.merge
    assert most is not None, "`problem` was asked"
    ratio = max(height / most[0], width / most[1])
    if ratio > 1:
        height, width = int(height / ratio), int(width / ratio)
    return -(-height // side), -(-width // side)


def largest_grid(settings: Settings) -> Grid:
    most, side = _most(settings), settings.patch_size * settings.merge
    assert most is not None, "`problem` was asked"
    return -(-most[0] // side), -(-most[1] // side)


tile_grid = largest_grid


def _most(settings: Settings) -> tuple[int, int] | None:
    """Return the largest height and width; None if the settings have none."""
    size = settings.fields["size"]
    size = size if isinstance(size, dict) else {}
    edge = size.get("longest_edge")
    height, width = edge or size.get("height"), edge or size.get("width")
    return (height, width) if isinstance(height, int) and isinstance(width, int) else None
