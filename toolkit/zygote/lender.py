"""Workers, as the server's threads use them: taken from the zygote, and returned."""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

import msgspec

from toolkit.errors import EngineError, ServerUnavailableError, ToolkitError, error_of_kind
from toolkit.zygote.keeper import ANSWER_TIMEOUT, Keeper
from toolkit.zygote.messages import (
    Answer,
    Channel,
    End,
    Ended,
    Failed,
    Job,
    Ready,
    Refused,
    Return,
    Take,
    Taken,
    Unavailable,
    Waiting,
)

KEPT = 0.005  # seconds for several tasks: to take a worker costs as much as a small task


Data = bytes | bytearray | memoryview | mmap.mmap


class WorkerLostError(Exception):
    """The worker has ended, or its answer is wrong."""


class Worker:
    """A process that decodes. Used by one thread."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def ask(
        self, job: Job, data: Data, timeout: float
    ) -> tuple[Answer | Refused, bytearray | bytes]:
        """Return the answer and its bytes. Raises TimeoutError and WorkerLostError.

        Hostile data may have taken the worker over, so that its answer is checked."""
        deadline = time.monotonic() + timeout
        try:
            self._channel.send(job, data, deadline=deadline)
            answer = self._channel.receive(job.answer | Refused, deadline)
            if isinstance(answer, Refused):
                return answer, b""
            if answer.num_bytes != job.expected_bytes(answer):
                raise WorkerLostError
            return answer, self._channel.read(answer.num_bytes, deadline)
        except TimeoutError:
            raise
        except (OSError, EOFError, ValueError, msgspec.MsgspecError):
            raise WorkerLostError from None

    def close(self) -> None:
        """Close the socket. The zygote has another descriptor of it."""
        self._channel.close()


class Lender:
    """A connection to the zygote, which lends a worker at a time. Used by one thread."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._channel: Channel | None = None
        self._worker: Worker | None = None
        self._taken_at = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def connect(self) -> Channel:
        """Connect, unless it is. Waits until the zygote is ready.

        Raises EngineError if it cannot be, and ServerUnavailableError."""
        while self._channel is None:
            try:
                channel = self._keeper.connect()
            except OSError as error:
                raise self._unreachable(error.strerror) from None
            with self._lock:
                if self._is_closed:
                    channel.close()
                    raise ServerUnavailableError("The server is shutting down.")
                self._channel = channel
            try:
                answer = channel.receive(Ready | Unavailable)
            except (OSError, EOFError):  # the zygote has just ended
                self.disconnect()
                continue
            if isinstance(answer, Unavailable):
                self.disconnect()
                raise _error_of(answer)
        return self._channel

    def take(self, *, is_urgent: bool) -> Worker:
        """Wait for a worker, unless one is taken. Raises the errors of `connect`."""
        while self._worker is None:
            try:
                answer, end = self._ask(self.connect(), Take(is_urgent))
            except (OSError, EOFError):  # the zygote has ended, or hangs
                self.disconnect()
                continue
            if isinstance(answer, Taken) and end is not None:
                self._worker = Worker(Channel(end))
                self._taken_at = time.monotonic()
            elif isinstance(answer, Failed):
                raise ServerUnavailableError(
                    f"A process that decodes {self._keeper.subject}: {answer.problem}."
                )
            else:
                self.disconnect()
                raise self._unreachable("too many open files")
        return self._worker

    @property
    def keeps_worker(self) -> bool:
        """True if a worker is taken that may do more: others do not wait for it for long."""
        return self._worker is not None and time.monotonic() < self._taken_at + KEPT

    def give_back(self) -> None:
        """Return the worker, if one is taken. It has answered all that it was asked."""
        if self._worker is None or self._channel is None:
            return
        self._release()
        try:
            self._channel.send(Return())
        except OSError:
            self.disconnect()

    def end(self) -> int | None:
        """Kill the worker. Returns its exit code, None if the zygote is lost."""
        assert self._channel is not None
        self._release()
        try:
            answer, _ = self._ask(self._channel, End())
        except (OSError, EOFError):
            self.disconnect()
            return None
        assert isinstance(answer, Ended)
        return answer.exit_code

    def disconnect(self) -> None:
        """Close the connection. The zygote kills a worker that is taken."""
        self._release()
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None

    def close(self) -> None:
        """Make the thread's calls fail, now and later. Called by another thread."""
        with self._lock:
            self._is_closed = True
            if self._channel is not None:
                self._channel.shut_down()

    def _ask(self, channel: Channel, message: Take | End) -> tuple[Any, Any]:
        """Return the answer, and the socket that came with it. Raises OSError and EOFError."""
        channel.send(message)
        while True:
            deadline = time.monotonic() + ANSWER_TIMEOUT
            found = channel.receive_with_socket(Taken | Waiting | Ended | Failed, deadline)
            if not isinstance(found[0], Waiting):
                return found

    def _unreachable(self, problem: str | None) -> ServerUnavailableError:
        return ServerUnavailableError(
            f"The process that decodes {self._keeper.subject} cannot be reached: {problem}."
        )

    def _release(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _error_of(answer: Unavailable) -> ToolkitError:
    return error_of_kind(answer.kind, answer.message) or EngineError(answer.message)
