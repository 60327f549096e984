"""Work of the processes that decode pictures."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import msgspec
from PIL import Image

from toolkit.pictures.decoding import decode, decode_base64, measure
from toolkit.pictures.messages import Done, Job
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import PictureLimits, ProcessorSettings
from toolkit.zygote.worker import NOTHING, RefusedError

BYTES_PER_PIXEL = 24
"""Memory for a picture of the largest size: in Pillow, turned, composited, and in NumPy."""
OTHER_BYTES = 2**28  # memory for the file, the resized picture and libraries
_HIDDEN = {"torch", "torchvision", "jax", "tensorflow"}


class PictureWork:
    """Decodes and resizes pictures. Implements `Work`."""

    job = Job

    def __init__(self, settings: ProcessorSettings, limits: PictureLimits) -> None:
        self._limits = limits
        self._processor = PictureProcessor(settings)
        self._processor.process(Image.new("RGB", (64, 64)))  # it imports more then

    @property
    def memory(self) -> int:
        limits = self._limits
        return limits.max_pixels * BYTES_PER_PIXEL + limits.max_bytes * 4 + OTHER_BYTES

    def do(self, job: Job, data: bytearray) -> tuple[Done, memoryview]:
        """Return the pixels of a picture, or its size. Raises PictureError."""
        encoded = bytes(data)
        if job.encoding == "base64":
            encoded = decode_base64(encoded)
        if job.encoding != "rgb" and len(encoded) > (most := self._limits.max_bytes):
            raise RefusedError(f"is a file of {len(encoded):,} bytes; at most {most:,} are allowed")
        if job.is_measured:
            return Done(*measure(encoded, self._limits.max_pixels)), NOTHING
        if job.encoding == "rgb":
            image = Image.frombytes("RGB", job.size, encoded)
        else:
            image = decode(encoded, self._limits.max_pixels)
        del encoded
        grid, array = self._processor.process(image)
        done = Done(
            *image.size,
            grid=grid,
            shape=array.shape,
            dtype="float32" if array.dtype == "float32" else "uint8",
            num_bytes=array.nbytes,
        )
        return done, array.reshape(-1).view("uint8").data


def load(settings: bytes) -> PictureWork:
    """Return the work of a zygote, whose settings `start_of` has encoded."""
    with _without_torch():
        return PictureWork(
            *msgspec.msgpack.decode(settings, type=tuple[ProcessorSettings, PictureLimits])
        )


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Import Transformers as if PyTorch was not installed.

    Pillow's image processors do not need it. It would take 4 seconds and 380 MB."""
    found = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name.partition(".")[0] in _HIDDEN else found(name, package)

    importlib.util.find_spec = find_spec
    try:
        yield
    finally:
        importlib.util.find_spec = found
