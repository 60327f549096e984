"""Processes that decode sound files, as the server and the offline engine use them."""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque
from concurrent.futures import Future
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.errors import InvalidParamError, ServerUnavailableError
from toolkit.files import failure, open_file
from toolkit.speech.clip import SAMPLE_RATE
from toolkit.speech.messages import Done, Job, SoundLimits
from toolkit.speech.wave_file import plain_samples
from toolkit.zygote.messages import Start
from toolkit.zygote.pool import WorkerPool
from toolkit.zygote.tasks import Task

Samples = npt.NDArray[np.int16]
Source = bytes | mmap.mmap | Path
_FILES = "files"  # queue


class SoundPool:
    """Decodes sound files with workers, each one at a time."""

    def __init__(self, limits: SoundLimits, keeper_path: str = "") -> None:
        """`keeper_path`: socket of the `KeeperServer` whose zygote to use, not one of this pool."""
        self._limits = limits
        self._held = _HeldSamples(limits.bytes_in_flight)
        start = Start(
            subject="sound files",
            means="The decoder of sound files",
            module="toolkit.speech.work",
            settings=msgspec.msgpack.encode(limits),
            timeout=limits.timeout,
        )
        self._pool = WorkerPool(start, (_FILES,), keeper_path)

    def start(self) -> None:
        """Start the zygote and return at once."""
        self._pool.start()

    def wait_ready(self) -> None:
        """Wait until the zygote is ready. Raises ToolkitError if it cannot be."""
        self._pool.wait_ready()

    @property
    def zygote_pid(self) -> int:
        """Process id of the zygote, whose children are the workers. 0 if it is not the pool's."""
        return self._pool.zygote_pid

    def decode(self, source: Source, param: str = "file") -> Future[Samples]:
        """Return the samples of a file at 16 kHz, its channels mixed: [n], n > 0.

        `source`: the bytes of a file, or its path. The future's errors: InvalidRequestError about
        `param`, ServerUnavailableError beyond `bytes_in_flight` too, and EngineError.

        Files that need no decoding do not go through a process."""
        if isinstance(source, bytes) and (plain := self._plain(source)) is not None:
            return plain
        task = _SoundTask(source, param, self._limits, self._held)
        self._pool.put(_FILES, task)
        return task.future

    def _plain(self, data: bytes) -> Future[Samples] | None:
        """Return the samples of a WAV file that has them as they are wanted; None for others."""
        samples = plain_samples(data, SAMPLE_RATE)
        limits = self._limits
        if samples is None or not 0 < samples.nbytes <= limits.max_samples_bytes:
            return None
        if len(data) > limits.max_bytes:
            return None
        done: Future[Samples] = Future()
        try:
            done.set_result(self._held.hold(samples))
        except ServerUnavailableError as error:
            done.set_exception(error)
        return done

    def close(self) -> None:
        """End all processes of the pool. Files that are not decoded get an error."""
        self._pool.close()


class _HeldSamples:
    """Samples of all requests that the process holds, of at most a number of bytes."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._used = 0
        self._lock = threading.Lock()
        self._released: deque[int] = deque()
        """Bytes of samples that are garbage: finalizers run anywhere, also inside the lock."""

    def hold(self, samples: Samples) -> Samples:
        """Count samples until they are garbage. Raises ServerUnavailableError for too many."""
        size = samples.nbytes
        with self._lock:
            while self._released:
                self._used -= self._released.popleft()
            if self._used + size > self._most:
                raise ServerUnavailableError(
                    f"The sound of all requests has {self._used:,} bytes; the {size:,} of this "
                    f"file would exceed the {self._most:,} that this server holds."
                )
            self._used += size
        weakref.finalize(samples, self._released.append, size).atexit = False
        return samples


class _SoundTask(Task):
    """A file to decode."""

    def __init__(self, source: Source, param: str, limits: SoundLimits, held: _HeldSamples) -> None:
        super().__init__(param)
        self._source, self._name, self._limits, self._held = source, param, limits, held

    def job(self) -> tuple[Job, bytes | mmap.mmap]:
        data = self._source
        if isinstance(data, Path):
            data = self._read(data)
        return Job(len(data), self._limits.max_samples_bytes), data

    def _read(self, path: Path) -> bytes:
        try:
            with open_file(path, self._limits.max_bytes) as file:
                return file.read()
        except OSError as error:
            problem = f"cannot be read: {path}: {failure(error)}"
            raise InvalidParamError(self._name, problem) from None

    def result(self, answer: Done, data: bytearray | bytes) -> Samples:
        return self._held.hold(np.frombuffer(data, "<i2").astype(np.int16, copy=False))
