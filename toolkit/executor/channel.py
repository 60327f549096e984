"""Messages over a pair of connected sockets: each is its length in eight bytes, then itself."""

import socket
import threading
from contextlib import suppress

from toolkit.executor.rank_messages import FromRank, ToRank, encode
from toolkit.framing import HEADER, frame

LINGER = 2.0  # seconds in which the other end may read the last message


class SocketChannel:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()

    def send(self, message: ToRank | FromRank) -> bool:
        """Send a message. Return False if the other end is gone."""
        return self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> bool:
        """Send an encoded message. Return False if the other end is gone."""
        with self._lock:
            try:
                self._socket.sendall(frame(data))
            except OSError:
                return False
        return True

    def receive(self) -> bytearray:
        """Return the next message. Raises EOFError if the other end is gone."""
        (length,) = HEADER.unpack(self._read(HEADER.size))
        return self._read(length)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the receiver
        self._socket.close()

    def finish(self) -> None:
        """Stop sending, and wait until the other end has read everything.

        Over TCP, closing at once may discard data in transit."""
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
