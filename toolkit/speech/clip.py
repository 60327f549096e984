"""Clips: the sound that a model hears at once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.errors import InvalidRequestError

SAMPLE_RATE = 16_000  # samples in a second of a clip
_TAGS: dict[bytes, type[np.generic]] = {b"s16\0": np.int16, b"f32\0": np.float32}
"""First bytes of a clip's data, and the type of the samples that follow, little-endian."""
_FULL_SCALE = 2**15


@dataclass(frozen=True)
class Clip:
    """Mono sound at 16 kHz, as bytes that travel to the engine core.

    Samples are 16-bit integers, as most files have, or 32-bit floats from -1 to 1."""

    data: bytes

    @classmethod
    def of(cls, samples: npt.NDArray[Any]) -> Clip:
        """Return the clip of samples [n], int16 or floats. Raises InvalidRequestError."""
        if samples.ndim != 1:
            raise InvalidRequestError(
                f"A clip has one channel, an array [samples]; this array is {list(samples.shape)}.",
                param="multi_modal_data",
            )
        if samples.dtype == np.int16:
            return cls(b"s16\0" + samples.astype("<i2").tobytes())
        if not np.issubdtype(samples.dtype, np.floating):
            raise InvalidRequestError(
                f"Samples of a clip must be int16 or floats from -1 to 1; these are "
                f"{samples.dtype}.",
                param="multi_modal_data",
            )
        if not np.isfinite(samples).all():
            raise InvalidRequestError(
                "Samples of a clip must be finite: some are not numbers.",
                param="multi_modal_data",
            )
        return cls(b"f32\0" + samples.astype("<f4").tobytes())

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that other clips do not have."""
        return sha256(self.data).digest()[:16]  # faster than BLAKE2 on long data

    @property
    def num_samples(self) -> int:
        return (len(self.data) - 4) // np.dtype(_TAGS[self.data[:4]]).itemsize

    @property
    def seconds(self) -> float:
        return self.num_samples / SAMPLE_RATE

    def after(self, seconds: float) -> Clip:
        """Return the clip without its first seconds."""
        size = round(seconds * SAMPLE_RATE) * np.dtype(_TAGS[self.data[:4]]).itemsize
        return Clip(self.data[:4] + self.data[4 + size :])

    @property
    def samples(self) -> npt.NDArray[np.float32]:
        """The samples, from -1 to 1: [num_samples]."""
        kind = _TAGS[self.data[:4]]
        found = np.frombuffer(self.data, np.dtype(kind).newbyteorder("<"), offset=4)
        if kind is np.float32:
            return found.astype(np.float32)
        return found.astype(np.float32) / np.float32(_FULL_SCALE)
