"""Work of the processes that decode sound files."""

from __future__ import annotations

import contextlib
import importlib

import msgspec

from toolkit.speech.messages import Done, Job, SoundLimits
from toolkit.speech.sound import decode
from toolkit.zygote.worker import RefusedError

OTHER_BYTES = 2**28  # memory for blocks of samples, and for libraries


class SoundWork:
    """Decodes sound files. Implements `Work`."""

    job = Job

    def __init__(self, limits: SoundLimits) -> None:
        self._limits = limits
        for name in ("soundfile", "av"):
            with contextlib.suppress(ImportError, OSError):  # files that need them are refused
                importlib.import_module(name)

    @property
    def memory(self) -> int:
        return 2 * (self._limits.max_bytes + self._limits.max_samples_bytes) + OTHER_BYTES

    def do(self, job: Job, data: bytearray) -> tuple[Done, memoryview]:
        """Return the samples of a file. Raises SoundError."""
        if len(data) > (most := self._limits.max_bytes):
            raise RefusedError(f"is a file of {len(data):,} bytes; at most {most:,} are allowed")
        samples = decode(data, self._limits.max_seconds)
        return Done(samples.nbytes), samples.view("uint8").data


def load(settings: bytes) -> SoundWork:
    """Return the work of a zygote."""
    return SoundWork(msgspec.msgpack.decode(settings, type=SoundLimits))
