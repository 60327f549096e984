"""Messages between the server, the zygote and its workers: msgpack, then raw bytes."""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import time
from typing import Any, ClassVar, Protocol

import msgspec

from toolkit.framing import HEADER, frame

MAX_MESSAGE = 2**20  # bytes of a message; settings are the largest
_TIMEVAL = struct.Struct("@ll")


class Start(msgspec.Struct, frozen=True, tag=True):
    """First message to the zygote, and of an API worker to the process that keeps zygotes."""

    subject: str  # of errors, such as "pictures"
    means: str  # of decoding it, which `load` imports: begins an error
    module: str  # whose function `load` returns the workers' `Work`
    settings: bytes  # argument of `load`
    timeout: float  # seconds for a worker to do a job


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Lend workers to the client at the other end of the socket that comes with this message.

    The answer is Ready, to the client too."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The zygote has imported what its workers need, or takes a client's messages."""


class Unavailable(msgspec.Struct, frozen=True, tag=True):
    """There is no zygote for the client: an error, by its class."""

    kind: str
    message: str


class Take(msgspec.Struct, frozen=True, tag=True):
    """Ask for a worker. The answer is Taken or Failed, after any number of Waiting."""

    is_urgent: bool  # before those that are not


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A worker, whose socket comes with this message. It is the client's until Return or End."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """All workers are taken. Sent every few seconds, so that a zygote that hangs is noticed."""


class Return(msgspec.Struct, frozen=True, tag=True):
    """Return the worker: it has answered its jobs. There is no answer."""


class End(msgspec.Struct, frozen=True, tag=True):
    """Kill the worker that was taken, unless it has ended. The answer is Ended."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """`exit_code` is negative for a signal."""

    exit_code: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The zygote could not do it."""

    problem: str


class Answer(Protocol):
    """Answer to a job. `num_bytes` follow."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_last(self) -> bool:
        """True if the worker has grown, and ends."""
        ...


class Job(Protocol):
    """Message to a worker. Its bytes follow."""

    answer: ClassVar[type[msgspec.Struct]]

    @property
    def num_bytes(self) -> int: ...

    def expected_bytes(self, answer: Any) -> int:
        """Return the bytes of an answer. Raises ValueError for a wrong answer."""
        ...


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Answer to a job: a problem of its data, which follows the name of a parameter."""

    problem: str
    is_last: bool = False


class Channel:
    """One end of a socket between two of the processes."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(
        self,
        message: msgspec.Struct | Job,
        data: bytes | bytearray | memoryview | mmap.mmap = b"",
        *,
        descriptors: tuple[int, ...] = (),
        deadline: float | None = None,
    ) -> None:
        """Send a message and its bytes. Raises OSError, TimeoutError after the deadline."""
        self._limit(deadline)
        encoded = frame(msgspec.msgpack.encode(message))
        if descriptors:
            sent = socket.send_fds(self.socket, [encoded], descriptors)
            encoded = encoded[sent:]
        self.socket.sendall(encoded)
        if data:
            self._limit(deadline)
            self.socket.sendall(data)

    def receive(self, kind: Any, deadline: float | None = None) -> Any:
        """Return the next message, of a type or one of a union.

        Raises OSError, EOFError at the end, TimeoutError, and ValueError for a wrong message."""
        (length,) = HEADER.unpack(self.read(HEADER.size, deadline))
        return self._decode(length, kind, deadline)

    def receive_with_socket(
        self, kind: Any, deadline: float | None = None
    ) -> tuple[Any, socket.socket | None]:
        """Return the next message and the socket that came with it."""
        self._limit(deadline)
        head, descriptors, _, _ = socket.recv_fds(self.socket, HEADER.size, 1)
        end = socket.socket(fileno=descriptors[0]) if descriptors else None
        if not head:
            raise EOFError
        head += self.read(HEADER.size - len(head), deadline)
        return self._decode(HEADER.unpack(head)[0], kind, deadline), end

    def read(self, count: int, deadline: float | None = None) -> bytearray:
        """Return the next `count` bytes. They are read in one call of the system: for each, this
        thread waits for Python's lock."""
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            self._limit(deadline, in_system=True)
            try:
                received = self.socket.recv_into(rest, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                raise TimeoutError from None
            if not received:
                raise EOFError
            rest = rest[received:]
        return data

    def shut_down(self) -> None:
        """Make the calls of other threads fail."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.socket.close()

    def _decode(self, length: int, kind: Any, deadline: float | None) -> Any:
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes, more than {MAX_MESSAGE}")
        return msgspec.msgpack.decode(self.read(length, deadline), type=kind)

    def _limit(self, deadline: float | None, *, in_system: bool = False) -> None:
        """Let calls wait until the deadline. in_system: for reading, without Python's own loop."""
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        self.socket.settimeout(None if in_system else left)
        if in_system:
            seconds, part = divmod(left or 0.0, 1.0)  # 0: without end
            limit = _TIMEVAL.pack(int(seconds), max(int(part * 1e6), left is not None))
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
