"""The ZMQ sockets between front end and core."""

from __future__ import annotations

import zmq

Socket = zmq.Socket[bytes]


def open_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """A socket whose queue has no limit, so that sending never blocks."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    return socket


def has_message(socket: Socket) -> bool:
    """Whether one can be received at once. Cheaper than to poll, and resets the socket's descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def descriptor(socket: Socket) -> int:
    """The file descriptor that becomes readable when something has happened on the socket."""
    return int(socket.getsockopt(zmq.FD))
