"""Channels over TCP between machines. A caller proves that it has the key without sending it."""

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

from toolkit.executor.channel import SocketChannel

KEY_SIZE = 32
PROOF_TIMEOUT = 5.0  # seconds that a caller has to prove itself
PEER_TIMEOUT = 10
"""Seconds without an acknowledgement after which a machine is lost. One without power closes no
connection."""
_PROOF = struct.Struct("<q32s")


class TCPListener:
    """Listens for an engine's ranks until it is closed."""

    def __init__(self, host: str) -> None:
        """`host`: the only address of this machine to listen on."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.key = secrets.token_bytes(KEY_SIZE)

    def accept(
        self, ranks: Collection[int], patience: float, look: Callable[[], None]
    ) -> dict[int, SocketChannel]:
        """Wait until these ranks have called. Raises TimeoutError.

        `look` is called regularly, and raises an error if a rank will never call."""
        deadline = time.monotonic() + patience
        found: dict[int, SocketChannel] = {}
        known: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

        def ask(caller: socket.socket) -> None:
            known.put((self._authenticate(caller), caller))

        self._listener.settimeout(0.1)
        while len(found) < len(ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "no call from " + ", ".join(f"rank {r}" for r in ranks if r not in found)
                )
            try:
                caller, _ = self._listener.accept()
                # One thread per caller, so that a silent one does not block others.
                threading.Thread(target=ask, args=(caller,), daemon=True, name="door").start()
            except TimeoutError:
                look()
            while not known.empty():
                rank, caller = known.get()
                if rank in ranks and rank not in found:
                    found[rank] = SocketChannel(_configure(caller))
                else:
                    caller.close()
        return found

    def close(self) -> None:
        self._listener.close()

    def _authenticate(self, caller: socket.socket) -> int:
        """Return the number of the calling rank, or -1 for a stranger."""
        caller.settimeout(PROOF_TIMEOUT)
        nonce = secrets.token_bytes(KEY_SIZE)
        try:
            caller.sendall(nonce)
            rank, proof = _PROOF.unpack(_read(caller, _PROOF.size))
        except OSError:
            return -1
        return int(rank) if hmac.compare_digest(proof, _proof(self.key, nonce, rank)) else -1


def call(host: str, port: int, key: bytes, rank: int) -> SocketChannel:
    """Connect to a listener. Raises OSError."""
    end = socket.create_connection((host, port), timeout=PEER_TIMEOUT)
    nonce = _read(end, KEY_SIZE)
    end.sendall(_PROOF.pack(rank, _proof(key, nonce, rank)))
    return SocketChannel(_configure(end))


def _proof(key: bytes, nonce: bytes, rank: int) -> bytes:
    return hmac.digest(key, nonce + struct.pack("<q", rank), "sha256")


def _read(end: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        got = end.recv(count - len(data))
        if not got:
            raise ConnectionError("the other end is gone")
        data += got
    return data


def _configure(end: socket.socket) -> socket.socket:
    """Send small messages at once, and detect the loss of the other machine."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": PEER_TIMEOUT // 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": PEER_TIMEOUT // 2,
        "TCP_USER_TIMEOUT": PEER_TIMEOUT * 1000,
    }.items():
        if hasattr(socket, name):  # Linux has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end
