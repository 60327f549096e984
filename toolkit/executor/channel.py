"""Messages over a pair of connected sockets: each is its length in eight bytes, then itself."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from toolkit.executor.messages import FromRank, ToRank, encode

_LENGTH = struct.Struct("<Q")


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: ToRank | FromRank) -> None:
        """Waits until the system has taken it; what is sent to an end that is gone is dropped."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        """The same, of an encoded message."""
        with (
            self._lock,
            suppress(BrokenPipeError, ConnectionResetError),
        ):  # its end is noticed where it is received from
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self) -> bytearray:
        """The next message. Raises EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._socket.recv_into(view[at:])
            except ConnectionResetError:
                got = 0
            if not got:
                raise EOFError
            at += got
        return data
