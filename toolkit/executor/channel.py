"""Messages over a pair of connected sockets: each is its length in eight bytes, then itself."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress

from toolkit.executor.rank_messages import FromRank, ToRank, encode

_LENGTH = struct.Struct("<Q")
LINGER = 2.0
"""Seconds in which the other end may read what it was sent last."""


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: ToRank | FromRank) -> bool:
        """Waits until the system has taken it; False when the other end is gone."""
        return self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> bool:
        """The same, of an encoded message."""
        with self._lock:
            try:
                self._socket.sendall(_LENGTH.pack(len(data)) + data)
            except OSError:
                return False
        return True

    def receive(self) -> bytearray:
        """The next message. Raises EOFError when the other end is gone."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who receives
        self._socket.close()

    def finish(self) -> None:
        """Sends no more, and waits until all is read: to close at once may take back what is under way, over TCP."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            self._socket.settimeout(LINGER)
            while self._socket.recv(1 << 16):
                pass

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._socket.recv_into(view[at:])
            except OSError:
                got = 0
            if not got:
                raise EOFError
            at += got
        return data
