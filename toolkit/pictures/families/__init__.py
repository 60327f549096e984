"""Families of image processors: one module for each kind of output.

A module has these names, and imports nothing but NumPy:
- PROCESSORS: class name without suffix, and the Transformers module of its Pillow-backed class.
- DEFAULTS: for each class, fields that preprocessor_config.json may lack, but are needed here.
- OPTIONS: fields that are read; others in the file are ignored, others from the user an error.
- OWN_ARGUMENTS: options with which Transformers' processor of the model calls the image processor.
- ARGUMENTS: options of our call.
- ENDS: names in processor_config.json of the tokens after a row of a picture's tokens and after the
  last row, and their defaults. Empty: there are none.
- TILES: text around the tiles of a picture; None: pictures are not split.
- modernize(fields): replaces names of older Transformers. Raises ValueError.
- fit(patch_size, merge): fields that follow from the tower.
- pads(fields): True if values are added after normalization. Then the processor's floats travel.
- problem(settings): why the tower cannot use the settings, or an empty string.
- refusal(settings, width, height): problem of a picture that the processor cannot take, or an empty
  string.
- token_grid(settings, width, height): rows and columns of the tokens of any other picture. A grid
  of several tiles is followed by a tile of the whole picture.
- largest_grid(settings): rows and columns of most tokens.
- tile_grid(settings): rows and columns of most tokens that the tower encodes together.
- pack(settings, outputs): (grid, array) that travels, from the processor's outputs.

Settings and pictures of the functions after `problem` have passed those before."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

Grid = tuple[int, int]  # rows and columns of tokens

COMMON_OPTIONS = frozenset(
    {
        "crop_size",
        "do_center_crop",
        "do_convert_rgb",
        "do_normalize",
        "do_pad",
        "do_rescale",
        "do_resize",
        "image_mean",
        "image_std",
        "pad_size",
        "resample",
        "rescale_factor",
        "size",
    }
)
CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
INTEGERS: dict[str, Any] = {"do_rescale": False, "do_normalize": False}


@dataclass(frozen=True, slots=True)
class TileTexts:
    """Text around the tiles of a picture, as Transformers' processor of the model writes it.

    Names of `tokens` in braces stand for them, {row} and {column} count tiles from 1."""

    tokens: Mapping[str, str]  # names in tokenizer_config.json, and their defaults
    start: str = ""  # before all tiles
    cell: str = ""  # before each tile but the last
    row_end: str = ""  # after each row of tiles but the last one
    last: str = ""  # before the last tile, of the whole picture
    alone: str = ""  # before the only tile
    end: str = ""  # after all tiles


class Settings(Protocol):
    """Part of `settings.ProcessorSettings` that families read."""

    @property
    def fields(self) -> dict[str, Any]: ...
    @property
    def patch_size(self) -> int: ...
    @property
    def merge(self) -> int: ...


class Family(Protocol):
    PROCESSORS: dict[str, str]
    DEFAULTS: dict[str, dict[str, Any]]
    OPTIONS: frozenset[str]
    OWN_ARGUMENTS: dict[str, Any]
    ARGUMENTS: dict[str, Any]
    ENDS: dict[str, str]
    TILES: TileTexts | None

    def modernize(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def fit(self, patch_size: int, merge: int) -> dict[str, Any]: ...
    def pads(self, fields: Mapping[str, Any]) -> bool: ...
    def problem(self, settings: Settings) -> str: ...
    def refusal(self, settings: Settings, width: int, height: int) -> str: ...
    def token_grid(self, settings: Settings, width: int, height: int) -> Grid: ...
    def largest_grid(self, settings: Settings) -> Grid: ...
    def tile_grid(self, settings: Settings) -> Grid: ...
    def pack(
        self, settings: Settings, outputs: Mapping[str, np.ndarray]
    ) -> tuple[tuple[int, ...], np.ndarray]: ...


def find_family(name: str) -> Family:
    """Import the module of a family."""
    return cast(Family, importlib.import_module(f"toolkit.pictures.families.{name}"))


def as_bytes(values: np.ndarray) -> np.ndarray:
    """Return integers from 0 to 255 as uint8. Raises ValueError for other values."""
    if values.dtype == np.uint8:
        return values
    converted = values.astype(np.uint8)
    if not np.array_equal(converted, values):
        raise ValueError("the image processor's values are not integers from 0 to 255")
    return converted


def in_squares(image: np.ndarray, patch_size: int, merge: int) -> np.ndarray:
    """Return the patches [n, channels * patch_size²] of an image [channels, height, width].

    Those of a square of merge x merge are together. Pixels after the last square are dropped."""
    channels, height, width = image.shape
    rows, columns = height // (patch_size * merge), width // (patch_size * merge)
    image = image[:, : rows * patch_size * merge, : columns * patch_size * merge]
    sides = rows, merge, patch_size, columns, merge, patch_size
    parts = image.reshape(channels, *sides).transpose(1, 4, 2, 5, 0, 3, 6)
    return parts.reshape(rows * columns * merge**2, -1)
