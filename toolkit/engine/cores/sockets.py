"""The ZMQ sockets between front ends and core.

The core binds `in`, where all front ends push; each front end binds `out` and its number, where the core pushes.
"""

from __future__ import annotations

import zmq

Socket = zmq.Socket[bytes]

RETRY_INTERVAL = 10
"""Milliseconds between attempts to connect to who is not there yet."""


def open_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """A socket whose queue has no limit, so that sending never blocks."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, RETRY_INTERVAL)
    return socket


def address(folder: str, name: str) -> str:
    """ZMQ's address of the socket of that name in a folder."""
    return f"ipc://{folder}/{name}"


def has_message(socket: Socket) -> bool:
    """Whether one can be received at once. Cheaper than to poll, and resets the socket's descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def descriptor(socket: Socket) -> int:
    """The file descriptor that becomes readable when something has happened on the socket."""
    return int(socket.getsockopt(zmq.FD))
