"""A process that does jobs, one at a time, with limits on what it may do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn, Protocol

import msgspec

from toolkit.zygote.messages import Answer, Channel, Job, Refused

MAX_GROWTH = 2**26  # bytes that a worker may keep after a job
NICE = 10
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SOCKET = 3  # descriptor
_MAX_FILES = 2**20  # where there is no limit
NOTHING = memoryview(b"")
_libc = ctypes.CDLL(None)


class RefusedError(Exception):
    """Data that cannot be decoded. The message follows the name of a parameter."""


class Work(Protocol):
    """Jobs of a kind, and what they need: imported by the zygote, inherited by the workers."""

    job: type[msgspec.Struct]  # a message that is a `Job`

    @property
    def memory(self) -> int:
        """Bytes that a worker may map in addition to what it is forked with."""
        ...

    def do(self, job: Any, data: bytearray) -> tuple[Answer, memoryview]:
        """Return the answer and its bytes. Raises RefusedError."""
        ...


def serve(end: socket.socket, work: Work) -> NoReturn:
    """Take jobs from a socket until its other end is closed. Called in a forked process."""
    try:
        channel = Channel(_isolate(end))
        _limit(resource.RLIMIT_AS, _mapped_bytes() + work.memory)
        _Worker(channel, work).run()
    finally:
        os._exit(1)


class _Worker:
    def __init__(self, channel: Channel, work: Work) -> None:
        self._channel, self._work = channel, work
        self._own_bytes = _anonymous_bytes()

    def run(self) -> NoReturn:
        while True:
            answer, data = self._answer(self._channel.receive(self._work.job))
            if self._has_grown(data.nbytes):
                answer = msgspec.structs.replace(answer, is_last=True)
            self._channel.send(answer, data)
            if answer.is_last:
                os._exit(0)
            del data

    def _answer(self, job: Job) -> tuple[Any, memoryview]:
        try:
            return self._work.do(job, self._channel.read(job.num_bytes))
        except RefusedError as error:
            return Refused(str(error)), NOTHING
        except MemoryError:
            most = self._work.memory // 2**20
            return Refused(f"needs more than {most} MiB of memory", is_last=True), NOTHING
        except Exception as error:  # a bug: this is all that the server sees of it
            problem = f"cannot be decoded: internal error ({type(error).__name__}: {error})"
            return Refused(problem, is_last=True), NOTHING

    def _has_grown(self, in_use: int) -> bool:
        return _anonymous_bytes() > self._own_bytes + in_use + MAX_GROWTH


def _isolate(end: socket.socket) -> socket.socket:
    """Give up all that a worker does not need; it keeps its socket. Returns the socket."""
    if sys.platform == "linux":
        _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    os.environ.clear()
    os.nice(NICE)
    end = socket.socket(fileno=os.dup2(end.detach(), _SOCKET))
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(_SOCKET + 1, _MAX_FILES if most == resource.RLIM_INFINITY else most)
    _limit(resource.RLIMIT_FSIZE, 0)
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_NPROC, 0)
    return end


def _limit(kind: int, value: int) -> None:
    with contextlib.suppress(ValueError, OSError):  # macOS does not limit memory
        resource.setrlimit(kind, (value, value))


def _mapped_bytes() -> int:
    return _memory_pages()[0] * resource.getpagesize()


def _anonymous_bytes() -> int:
    """Return the resident memory that belongs to no file. 0 if the system does not say."""
    _, resident, shared = _memory_pages()
    return (resident - shared) * resource.getpagesize()


def _memory_pages() -> tuple[int, int, int]:
    try:
        with open("/proc/self/statm") as file:
            mapped, resident, shared = map(int, file.read().split()[:3])
    except OSError:
        return 0, 0, 0
    return mapped, resident, shared
