"""Processes that decode sound files."""

from __future__ import annotations

import mmap
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.errors import InvalidParamError
from toolkit.speech.sound import decode
from toolkit.speech.wave_file import SoundError


class SoundLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the sound in requests."""

    max_bytes: int = 256 * 2**20  # a file
    max_seconds: int = 4 * 3600
    timeout: float = 120.0  # seconds for a worker to decode a file


class SoundPool:
    """Decodes sound files with workers, each one at a time."""

    def __init__(self, limits: SoundLimits, keeper_path: str = "") -> None:
        """`keeper_path`: socket of the `KeeperServer` whose zygote to use, not one of this pool."""
        self._limits = limits
        self._threads = ThreadPoolExecutor(2)

    def start(self) -> None:
        """Start the zygote and return at once."""

    def decode(
        self, source: bytes | mmap.mmap | Path, param: str = "file"
    ) -> Future[npt.NDArray[np.int16]]:
        """Return the samples of a file at 16 kHz, its channels mixed: [n].

        The future's errors: InvalidRequestError about `param`, ServerUnavailableError,
        EngineError."""
        return self._threads.submit(self._decode, source, param)

    def close(self) -> None:
        """End all processes of the pool. Files that are not decoded get an error."""
        self._threads.shutdown(cancel_futures=True)

    def _decode(self, source: bytes | mmap.mmap | Path, param: str) -> npt.NDArray[np.int16]:
        data = source.read_bytes() if isinstance(source, Path) else source[:]
        try:
            return decode(data, self._limits.max_seconds)
        except SoundError as error:
            raise InvalidParamError(param, str(error)) from None
