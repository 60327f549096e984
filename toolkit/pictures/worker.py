"""A process that decodes pictures, one at a time, with limits on what it may do."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import NoReturn

import msgspec
from PIL import Image

from toolkit.pictures.decoding import PictureError, decode, decode_base64, measure
from toolkit.pictures.messages import Channel, Done, Job, Refused
from toolkit.pictures.processor import PictureProcessor
from toolkit.pictures.settings import PictureLimits

BYTES_PER_PIXEL = 24
"""Memory for a picture of the largest size: in Pillow, turned, composited, and in NumPy."""
OTHER_BYTES = 2**28  # memory for the file, the resized picture and libraries
MAX_GROWTH = 2**26  # bytes that a worker may keep after a picture
NICE = 10
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_SOCKET = 3  # descriptor
_MAX_FILES = 2**20  # where there is no limit
_NOTHING = memoryview(b"")
_libc = ctypes.CDLL(None)


def serve(end: socket.socket, processor: PictureProcessor, limits: PictureLimits) -> NoReturn:
    """Take jobs from a socket until its other end is closed. Called in a forked process."""
    try:
        channel = Channel(_isolate(end))
        _limit(resource.RLIMIT_AS, _mapped_bytes() + memory_allowance(limits))
        _Worker(channel, processor, limits).run()
    finally:
        os._exit(1)


def memory_allowance(limits: PictureLimits) -> int:
    """Return the bytes that a worker may map in addition to what it is forked with."""
    return limits.max_pixels * BYTES_PER_PIXEL + limits.max_bytes * 4 + OTHER_BYTES


class _Worker:
    def __init__(
        self, channel: Channel, processor: PictureProcessor, limits: PictureLimits
    ) -> None:
        self._channel, self._processor, self._limits = channel, processor, limits
        self._own_bytes = _anonymous_bytes()

    def run(self) -> NoReturn:
        while True:
            answer, pixels = self._answer(self._channel.receive(Job))
            if self._has_grown(pixels.nbytes):
                answer = msgspec.structs.replace(answer, is_last=True)
            self._channel.send(answer, pixels)
            if answer.is_last:
                os._exit(0)
            del pixels

    def _answer(self, job: Job) -> tuple[Done | Refused, memoryview]:
        try:
            return self._work(job)
        except PictureError as error:
            return Refused(str(error)), _NOTHING
        except MemoryError:
            most = memory_allowance(self._limits) // 2**20
            return Refused(f"needs more than {most} MiB of memory", is_last=True), _NOTHING
        except Exception as error:  # a bug: this is all that the server sees of it
            problem = f"cannot be decoded: internal error ({type(error).__name__}: {error})"
            return Refused(problem, is_last=True), _NOTHING

    def _work(self, job: Job) -> tuple[Done, memoryview]:
        data = bytes(self._channel.read(job.num_bytes))
        if job.encoding == "base64":
            data = decode_base64(data)
        if job.encoding != "rgb" and len(data) > (most := self._limits.max_bytes):
            raise PictureError(f"is a file of {len(data):,} bytes; at most {most:,} are allowed")
        if job.is_measured:
            return Done(*measure(data, self._limits.max_pixels)), _NOTHING
        if job.encoding == "rgb":
            image = Image.frombytes("RGB", job.size, data)
        else:
            image = decode(data, self._limits.max_pixels)
        del data
        grid, array = self._processor.process(image)
        done = Done(
            *image.size,
            grid=grid,
            shape=array.shape,
            dtype="float32" if array.dtype == "float32" else "uint8",
            num_bytes=array.nbytes,
        )
        return done, array.reshape(-1).view("uint8").data

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
