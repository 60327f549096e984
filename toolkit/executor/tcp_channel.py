"""Channels over TCP, between machines. Whoever calls proves that it was given the key, without sending it."""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection

from toolkit.executor.channel import Channel

KEY_SIZE = 32
ANSWER = 5.0
"""Seconds that a caller has for its proof."""
UNHEARD = 10
"""Seconds after which a machine that acknowledges nothing is gone: when its power is, no end of the connection comes."""
_PROOF = struct.Struct("<q32s")


class Door:
    """Where an engine's ranks call; open until it is closed."""

    def __init__(self, host: str) -> None:
        """`host`: the one address of this machine at which it can be called."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        self.key = secrets.token_bytes(KEY_SIZE)

    def admit(
        self, ranks: Collection[int], patience: float, look: Callable[[], None]
    ) -> dict[int, Channel]:
        """Waits until these have called; `look` is called now and then, and raises when one never will.

        Raises TimeoutError.
        """
        deadline = time.monotonic() + patience
        found: dict[int, Channel] = {}
        known: queue.SimpleQueue[tuple[int, socket.socket]] = queue.SimpleQueue()

        def ask(caller: socket.socket) -> None:
            known.put((self._who(caller), caller))

        self._listener.settimeout(0.1)
        while len(found) < len(ranks):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    "no call from " + ", ".join(f"rank {r}" for r in ranks if r not in found)
                )
            try:
                caller, _ = self._listener.accept()
                # Each in a thread of its own: one that says nothing keeps nobody else out.
                threading.Thread(target=ask, args=(caller,), daemon=True, name="door").start()
            except TimeoutError:
                look()
            while not known.empty():
                rank, caller = known.get()
                if rank in ranks and rank not in found:
                    found[rank] = Channel(_tuned(caller))
                else:
                    caller.close()
        return found

    def close(self) -> None:
        self._listener.close()

    def _who(self, caller: socket.socket) -> int:
        """The rank that calls; -1 for somebody else."""
        caller.settimeout(ANSWER)
        nonce = secrets.token_bytes(KEY_SIZE)
        try:
            caller.sendall(nonce)
            rank, proof = _PROOF.unpack(_read(caller, _PROOF.size))
        except OSError:
            return -1
        return int(rank) if hmac.compare_digest(proof, _proof(self.key, nonce, rank)) else -1


def call(host: str, port: int, key: bytes, rank: int) -> Channel:
    """The other end of a door's channel. Raises OSError."""
    end = socket.create_connection((host, port), timeout=UNHEARD)
    nonce = _read(end, KEY_SIZE)
    end.sendall(_PROOF.pack(rank, _proof(key, nonce, rank)))
    return Channel(_tuned(end))


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


def _tuned(end: socket.socket) -> socket.socket:
    """Small messages go at once, and the loss of the other machine is noticed."""
    end.settimeout(None)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": UNHEARD // 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": UNHEARD // 2,
        "TCP_USER_TIMEOUT": UNHEARD * 1000,
    }.items():
        if hasattr(socket, name):  # Linux has all of them
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end
