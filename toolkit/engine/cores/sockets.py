"""ZMQ sockets between front ends and a core.

The core binds `in`, to which all front ends push. Each front end binds `out` plus its number, to
which the core pushes."""

import zmq

Socket = zmq.Socket[bytes]

RETRY_INTERVAL = 10  # milliseconds between attempts to connect


def open_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """Open a socket with an unlimited queue, so that sending never blocks."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.setsockopt(zmq.RECONNECT_IVL, RETRY_INTERVAL)
    return socket


def address(folder: str, name: str) -> str:
    """Return the ZMQ address of a socket in a folder."""
    return f"ipc://{folder}/{name}"


def has_message(socket: Socket) -> bool:
    """Return True if a message can be received now.

    Cheaper than polling. Resets the socket's file descriptor."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def descriptor(socket: Socket) -> int:
    """Return the file descriptor that becomes readable after a socket event."""
    return int(socket.getsockopt(zmq.FD))
