"""Families of image processors: one module for each kind of output.

A module has these names, and imports nothing but NumPy:
- PROCESSORS: class name without suffix, and the Transformers module of its Pillow-backed class.
- DEFAULTS: for each class, fields that preprocessor_config.json may lack, but are needed here.
- OPTIONS: fields that are read; others in the file are ignored, others from the user an error.
- ARGUMENTS: options of the call.
- modernize(fields): replaces names of older Transformers. Raises ValueError.
- pads(fields): True if values are added after normalization. Then the processor's floats travel.
- refusal(width, height): problem of a picture that the processor cannot take, or an empty string.
- pack(outputs): (grid, array) that travels, from the outputs and `patch_size` if there is one."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

import numpy as np

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


class Family(Protocol):
    PROCESSORS: dict[str, str]
    DEFAULTS: dict[str, dict[str, Any]]
    OPTIONS: frozenset[str]
    ARGUMENTS: dict[str, Any]

    def modernize(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def pads(self, fields: Mapping[str, Any]) -> bool: ...
    def refusal(self, width: int, height: int) -> str: ...
    def pack(self, outputs: Mapping[str, np.ndarray]) -> tuple[tuple[int, ...], np.ndarray]: ...


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
