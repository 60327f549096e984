"""Transformers' image processor, as a worker calls it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.pictures.decoding import PictureError
from toolkit.pictures.families import find_family
from toolkit.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from PIL.Image import Image


class PictureProcessor:
    """A Pillow-backed image processor and its family."""

    def __init__(self, settings: ProcessorSettings) -> None:
        self._family, self._settings = find_family(settings.family), settings
        found = processor_class(settings)
        if (patchify := getattr(self._family, "patchify", None)) is not None:
            found = type(found.__name__, (found,), {"patchify": patchify})
        self._processor = found(**settings.fields)
        self._arguments: dict[str, Any] = dict(self._family.ARGUMENTS)
        if settings.sends_floats:
            del self._arguments["do_rescale"], self._arguments["do_normalize"]

    def process(self, image: Image) -> tuple[tuple[int, ...], np.ndarray]:
        """Return (grid, array) of a picture in RGB. Raises PictureError."""
        width, height = image.size
        if problem := self._family.refusal(self._settings, width, height):
            raise PictureError(problem)
        pixels = np.asarray(image)
        try:
            found = self._processor([pixels], input_data_format="channels_last", **self._arguments)
        except ValueError:
            raise PictureError(
                f"is a picture of {width} x {height} pixels, which the model's image processor "
                "refuses"
            ) from None
        outputs = {name: np.asarray(value) for name, value in found.items()}
        grid, array = self._family.pack(self._settings, outputs)
        return grid, np.ascontiguousarray(array)


def processor_class(settings: ProcessorSettings) -> Any:
    """Import Transformers' class."""
    name = find_family(settings.family).PROCESSORS[settings.name]
    module = importlib.import_module(f"transformers.models.{name}.image_processing_pil_{name}")
    return getattr(module, f"{settings.name}Pil")
