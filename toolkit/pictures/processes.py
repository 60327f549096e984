"""The zygote and its workers, seen from the server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from math import prod
from typing import Any

import msgspec

from toolkit.errors import EngineError, ServerUnavailableError
from toolkit.pictures.messages import (
    MAX_ANSWER,
    Channel,
    Done,
    End,
    Ended,
    Failed,
    Fork,
    Forked,
    Job,
    Ready,
    Refused,
    Start,
)
from toolkit.pictures.settings import PictureLimits, ProcessorSettings

START_TIMEOUT = 120.0  # seconds for the imports, on a slow disk
_ANSWER_TIMEOUT = 30.0  # seconds for the zygote to fork a worker or to end one
_ENVIRONMENT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that Python needs. Others may be secrets."""
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Else glibc maps and unmaps each array of a picture: page faults take a third of the time.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=33554432",
}
_ITEM_SIZES = {"uint8": 1, "float32": 4}


class ZygoteLostError(Exception):
    """The zygote has ended, and all its workers with it. The message has its last words."""


class WorkerLostError(Exception):
    """The worker has ended, or its answer is wrong."""


class Worker:
    """A process that decodes pictures. Used by one thread."""

    def __init__(self, pid: int, channel: Channel, zygote: Zygote) -> None:
        self.pid = pid
        self._channel = channel
        self._zygote = zygote

    @property
    def has_ended(self) -> bool:
        """True if the process has ended, or will because its zygote has."""
        return self._channel.has_ended or self._zygote.is_lost

    def ask(self, job: Job, data: bytes, timeout: float) -> tuple[Done | Refused, bytes]:
        """Return the answer and its pixels. Raises TimeoutError and WorkerLostError.

        A hostile picture may have taken the worker over, so that its answer is checked."""
        deadline = time.monotonic() + timeout
        try:
            self._channel.send(job, data, deadline=deadline)
            answer: Done | Refused = self._channel.receive(Done | Refused, deadline)
            if isinstance(answer, Refused):
                return answer, b""
            expected = 0 if job.is_measured else prod(answer.shape) * _ITEM_SIZES[answer.dtype]
            if answer.num_bytes != expected or expected > MAX_ANSWER:
                raise WorkerLostError
            return answer, bytes(self._channel.read(answer.num_bytes, deadline))
        except TimeoutError:
            raise
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            raise WorkerLostError from None

    def end(self) -> int | None:
        """Kill the process. Returns its exit code, None if the zygote is lost."""
        self._channel.close()
        return self._zygote.end(self.pid)


class Zygote:
    """The process that forks workers. Used by several threads."""

    def __init__(self, settings: ProcessorSettings, limits: PictureLimits) -> None:
        """Start the process and return at once. Raises ServerUnavailableError."""
        ours, theirs = socket.socketpair()
        self._control = Channel(ours)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._lock = threading.Lock()
        self._is_ready = False
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "toolkit.pictures.zygote"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env=_environment(),
                    start_new_session=True,  # Ctrl-C is for the server
                )
        except OSError as error:
            ours.close()
            raise ServerUnavailableError(
                f"The process that decodes pictures cannot be started: {error.strerror}."
            ) from None
        with contextlib.suppress(OSError):  # it has ended: `fork` says so
            self._control.send(Start(settings, limits))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fork(self) -> Worker:
        """Start a worker, after the imports.

        Raises ZygoteLostError, EngineError if the image processor cannot be imported, and
        ServerUnavailableError if there can be no process."""
        with self._lock:
            self._wait_ready()
            answer, end = self._ask(Fork())
        if isinstance(answer, Forked) and end is not None:
            return Worker(answer.pid, Channel(end), self)
        assert isinstance(answer, Failed)
        raise ServerUnavailableError(f"A process that decodes pictures: {answer.problem}.")

    def end(self, pid: int) -> int | None:
        """Kill a worker. Returns its exit code, None if the zygote is lost."""
        with self._lock:
            try:
                answer, _ = self._ask(End(pid))
            except ZygoteLostError:
                return None
        assert isinstance(answer, Ended)
        return int(answer.exit_code)

    @property
    def is_lost(self) -> bool:
        with self._lock:
            return self._control.has_ended

    def close(self) -> None:
        """End the process and its workers."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._control.close()
            self._errors.close()

    def _wait_ready(self) -> None:
        if self._is_ready:
            return
        answer = self._receive(Ready | Failed, START_TIMEOUT)[0]
        if isinstance(answer, Failed):
            raise EngineError(f"The image processor of the model cannot be used: {answer.problem}.")
        self._is_ready = True

    def _ask(self, message: Fork | End) -> tuple[Any, socket.socket | None]:
        try:
            self._control.send(message)
        except OSError:
            raise ZygoteLostError(self._last_words()) from None
        return self._receive(Forked | Ended | Failed, _ANSWER_TIMEOUT)

    def _receive(self, kind: Any, timeout: float) -> tuple[Any, socket.socket | None]:
        try:
            return self._control.receive_with_socket(kind, time.monotonic() + timeout)
        except TimeoutError:
            self._process.kill()
            raise ZygoteLostError(f"it did not answer for {timeout:g} seconds") from None
        except (OSError, EOFError):
            raise ZygoteLostError(self._last_words()) from None

    def _last_words(self) -> str:
        """Return the exit code and the last line that the process wrote."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)
        words = f"exit code {self._process.returncode}"
        with contextlib.suppress(OSError, ValueError):  # the file may be closed
            self._errors.seek(0)
            if lines := self._errors.read().decode(errors="replace").split("\n"):
                words += f": {lines[-2:][0][:300]}" if len(lines) > 1 else ""
        return words


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _SETTINGS
