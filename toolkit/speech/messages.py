"""Messages about sound files between the server and the workers, and their limits."""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec

from toolkit.speech.clip import SAMPLE_RATE

_ITEM_SIZE = 2  # bytes of a sample


class SoundLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the sound in requests."""

    max_bytes: int = 256 * 2**20  # a file
    max_seconds: int = 4 * 3600  # of its sound
    timeout: float = 120.0  # seconds for a worker to decode a file
    bytes_in_flight: int = 4 * 2**30  # samples held for all requests; beyond: 503

    @property
    def max_samples_bytes(self) -> int:
        """Most bytes of the samples of a file."""
        return self.max_seconds * SAMPLE_RATE * _ITEM_SIZE


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to a job. 16-bit samples follow."""

    num_bytes: Annotated[int, msgspec.Meta(ge=_ITEM_SIZE, multiple_of=_ITEM_SIZE)]
    is_last: bool = False  # the worker has grown, and ends


class Job(msgspec.Struct, frozen=True, tag=True):
    """Sound file for a worker. Its bytes follow."""

    answer: ClassVar[type[msgspec.Struct]] = Done
    num_bytes: int
    max_answer: int  # bytes of samples

    def expected_bytes(self, answer: Done) -> int:
        """Return the bytes of samples. Raises ValueError for too many."""
        if answer.num_bytes > self.max_answer:
            raise ValueError(f"samples of {answer.num_bytes} bytes, more than {self.max_answer}")
        return answer.num_bytes
