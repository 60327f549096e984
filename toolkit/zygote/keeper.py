"""Zygotes: started, started again after they have ended, and connected to.

`ZygoteKeeper` is for the process that starts the zygote. Of several API workers, each uses a
`RemoteKeeper`, and the server's first process has the `KeeperServer`."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Any, Protocol

import msgspec

from toolkit.errors import EngineError, ServerUnavailableError, ToolkitError
from toolkit.zygote.messages import Channel, Connect, Failed, Ready, Start, Unavailable

_log = logging.getLogger(__name__)
MAX_STARTS = 4  # of a zygote, in START_WINDOW
START_WINDOW = 600.0  # seconds
START_TIMEOUT = 120.0  # seconds for the imports, on a slow disk
ANSWER_TIMEOUT = 30.0  # seconds for the zygote to answer
_ENVIRONMENT = ("HOME", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV")
"""Variables that Python needs. Others may be secrets."""
_SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Else glibc maps and unmaps each array: page faults take a third of the time of a picture.
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=33554432",
}


class Keeper(Protocol):
    """Connects to a zygote. Used by several threads."""

    subject: str  # of errors, such as "pictures"

    @property
    def pid(self) -> int:
        """Process id of the zygote. 0 if another process has started it, or none has."""
        ...

    def start(self) -> None:
        """Start the zygote and return at once. Raises ServerUnavailableError."""
        ...

    def connect(self) -> Channel:
        """Return a connection, whose first message is Ready or Unavailable.

        Raises EngineError if what the workers need cannot be imported, ServerUnavailableError, and
        OSError."""
        ...

    def close(self) -> None:
        """End the zygote, if it was started here, and its workers."""
        ...


class ZygoteKeeper:
    """Starts a zygote, and another when it has ended. Implements `Keeper`."""

    def __init__(self, start: Start) -> None:
        self.subject = start.subject
        self._start = start
        self._zygote: _Zygote | None = None
        self._lock = threading.Lock()
        self._starts: deque[float] = deque(maxlen=MAX_STARTS)
        self._was_ready = False
        self._last_words = ""  # of the last zygote that ended
        self._error: ToolkitError | None = None  # of all connections from now on

    @property
    def pid(self) -> int:
        return self._zygote.pid if self._zygote else 0

    def start(self) -> None:
        self._living()

    def connect(self) -> Channel:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self.adopt(theirs)
            except BaseException:
                ours.close()
                raise
        return Channel(ours)

    def adopt(self, end: socket.socket) -> None:
        """Let the zygote serve the other end of a socket. Raises the errors of `connect`."""
        while True:
            zygote = self._living()
            try:
                zygote.adopt(end)
            except _ZygoteLostError:
                continue
            except EngineError as error:
                self._error = error
                raise
            self._was_ready = True
            return

    def close(self) -> None:
        with self._lock:
            self._error = self._error or ServerUnavailableError("The server is shutting down.")
            if self._zygote is not None:
                self._zygote.close()

    def _living(self) -> _Zygote:
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._zygote is not None and self._zygote.has_ended:
                self._last_words = self._zygote.last_words()
                self._zygote.close()
                self._zygote = None
            if self._zygote is None:
                self._zygote = self._start_zygote()
            return self._zygote

    def _start_zygote(self) -> _Zygote:
        """Start a zygote, unless the last few have ended too soon."""
        now = time.monotonic()
        if len(self._starts) == MAX_STARTS and now - self._starts[0] < START_WINDOW:
            error = ServerUnavailableError(
                f"The process that decodes {self.subject} ended {MAX_STARTS} times within "
                f"{START_WINDOW / 60:g} minutes ({self._last_words})."
            )
            if not self._was_ready:
                self._error = error
            raise error
        self._starts.append(now)
        try:
            return _Zygote(self._start)
        except OSError as error:
            raise ServerUnavailableError(
                f"The process that decodes {self.subject} cannot be started: {error.strerror}."
            ) from None


class KeeperServer:
    """Connects other processes to zygotes of this one, which are started when one asks.

    Those that ask for the same, by their Start messages, share a zygote."""

    def __init__(self, path: str) -> None:
        """Listen on a Unix socket at a path, in a folder that is this user's alone."""
        self._keepers: dict[bytes, ZygoteKeeper] = {}  # by the Start message
        self._lock = threading.Lock()
        self._is_closed = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(128)
        threading.Thread(target=self._listen, name="zygotes", daemon=True).start()

    def close(self) -> None:
        """End the zygotes and their workers."""
        with self._lock:
            self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread, but not on macOS
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for keeper in self._keepers.values():
            keeper.close()

    def _listen(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(1.0)  # too many open files
                continue
            with end:
                self._answer(Channel(end))

    def _answer(self, channel: Channel) -> None:
        """Let a zygote serve the other end of a channel, or send what prevents it."""
        try:
            start = channel.receive(Start, time.monotonic() + ANSWER_TIMEOUT)
        except (OSError, EOFError):  # the API worker has ended
            return
        try:
            self._keeper_of(start).adopt(channel.socket)
        except ToolkitError as error:
            refusal = Unavailable(type(error).__name__, error.message)
        except Exception as error:
            message = f"No more {start.subject} are decoded: internal error"
            _log.exception(message)
            message += f" ({error})"
            refusal = Unavailable(EngineError.__name__, message)
        else:
            return
        with contextlib.suppress(OSError):
            channel.send(refusal)

    def _keeper_of(self, start: Start) -> ZygoteKeeper:
        with self._lock:
            if self._is_closed:
                raise ServerUnavailableError("The server is shutting down.")
            key = msgspec.msgpack.encode(start, order="deterministic")
            if (keeper := self._keepers.get(key)) is None:
                keeper = self._keepers[key] = ZygoteKeeper(start)
            return keeper


class RemoteKeeper:
    """Connects to a zygote of the server's first process. Implements `Keeper`."""

    pid = 0

    def __init__(self, path: str, start: Start) -> None:
        self.subject = start.subject
        self._path, self._start = path, start

    def start(self) -> None:
        """Do nothing: the first connection starts the zygote."""

    def connect(self) -> Channel:
        channel = Channel(socket.socket(socket.AF_UNIX))
        try:
            channel.socket.connect(self._path)
            channel.send(self._start)
        except OSError:
            channel.close()
            raise
        return channel

    def close(self) -> None:
        """Do nothing: the zygote kills a worker whose client closes its connection."""


class _ZygoteLostError(Exception):
    """The zygote has ended, and all its workers with it."""


class _Zygote:
    """The process that forks workers. Used by several threads."""

    def __init__(self, start: Start) -> None:
        """Start the process and return at once. Raises OSError."""
        ours, theirs = socket.socketpair()
        self._means = start.means
        self._control = Channel(ours)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (as long as the process)
        self._lock = threading.Lock()
        self._is_ready = False
        self._problem = ""
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "toolkit.zygote.process"],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=_environment(),
                start_new_session=True,  # Ctrl-C is for the server
            )
        with contextlib.suppress(OSError):  # it has ended: `adopt` says so
            self._control.send(start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def adopt(self, end: socket.socket) -> None:
        """Hand over a client's connection, after the imports.

        Raises _ZygoteLostError, after which the process has ended, and EngineError if what the
        workers need cannot be imported."""
        with self._lock:
            if not self._is_ready:
                answer = self._receive(START_TIMEOUT)
                if isinstance(answer, Failed):
                    raise EngineError(f"{self._means} cannot be used: {answer.problem}.")
                self._is_ready = True
            try:
                self._control.send(Connect(), descriptors=(end.fileno(),))
            except OSError:
                raise self._lose() from None
            self._receive(ANSWER_TIMEOUT)

    def last_words(self) -> str:
        """Return why it was killed, or the exit code and the last line that it wrote."""
        if self._problem:
            return self._problem
        words = f"exit code {self._process.returncode}"
        with contextlib.suppress(OSError, ValueError):  # the file may be closed
            self._errors.seek(0)
            if lines := self._errors.read().decode(errors="replace").split("\n"):
                words += f": {lines[-2:][0][:300]}" if len(lines) > 1 else ""
        return words

    def close(self) -> None:
        """End the process and its workers."""
        self._process.kill()
        self._process.wait()
        with self._lock:
            self._control.close()
            self._errors.close()

    def _receive(self, timeout: float) -> Any:
        try:
            return self._control.receive(Ready | Failed, time.monotonic() + timeout)
        except TimeoutError:
            self._problem = f"it did not answer for {timeout:g} seconds"
            raise self._lose() from None
        except (OSError, EOFError):
            raise self._lose() from None

    def _lose(self) -> _ZygoteLostError:
        """Make sure that the process has ended. One that closed its socket is about to."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._problem else 1.0)
        self._process.kill()
        self._process.wait()
        return _ZygoteLostError()


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ} | _SETTINGS
