"""Connections of an API worker, kept by the first process for the case that the worker dies."""

import asyncio
import contextlib
import mmap
import os
import resource
import select
import socket
from collections import deque
from dataclasses import dataclass, field

from toolkit.api.http.connections.last_will import NO_SLOT, SLOT_BYTES, Slot, State
from toolkit.api.http.connections.listener import RESERVED_FILES

MAX_CONNECTIONS = 2**16  # of a worker; its further ones are not kept


@dataclass(slots=True)
class Ended:
    """Outcome of a worker's death for its kept connections."""

    num_warned: int = 0  # got an error
    num_cut: int = 0  # lost an answer in the middle
    idle: list[socket.socket] = field(default_factory=list)  # still open, for another worker


class KeptConnections:
    """Descriptors of a worker's connections, and the shared memory of their last wills.

    A worker shuts a connection down when it closes it; the kernel then reports a hang-up of the
    descriptor here. Linux only: other systems do not report that alone."""

    def __init__(self, num_workers: int) -> None:
        """`num_workers`: processes that share the limit of open files."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._max_descriptor = limit - RESERVED_FILES  # those from here on are for other uses
        self._capacity = min(MAX_CONNECTIONS, limit // (2 * num_workers))
        self.memory_file = os.memfd_create("tk-wills")
        os.truncate(self.memory_file, self._capacity * SLOT_BYTES)
        self._memory = mmap.mmap(self.memory_file, 0)
        self._connections: dict[int, tuple[socket.socket, int]] = {}  # and slots, by descriptor
        self._num_slots = 0  # that have been used
        self._free: deque[int] = deque()
        """Slots of connections that have ended. The worker may still write to one that the client
        has reset."""
        self._hang_ups = select.epoll()
        asyncio.get_running_loop().add_reader(self._hang_ups.fileno(), self.release)

    def hand_over(self, connection: socket.socket, channel: socket.socket) -> None:
        """Send a connection to the worker and keep it, or close it if no more can be kept.

        Raises OSError if the worker does not take it now."""
        # New descriptors are the lowest free ones, so a high one means that few are left.
        is_room = connection.fileno() < self._max_descriptor
        index = self._find_slot() if is_room else NO_SLOT
        try:
            socket.send_fds(channel, [index.to_bytes(4, "little")], [connection.fileno()])
        except OSError:
            if index != NO_SLOT:
                Slot(self._memory, index).close()
                self._free.append(index)
            raise
        if index == NO_SLOT:
            connection.close()
            return
        self._connections[connection.fileno()] = connection, index
        self._hang_ups.register(connection, 0)  # hang-ups and errors only

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    def release(self) -> None:
        """Close connections that have ended. The loop calls it."""
        for descriptor, _ in self._hang_ups.poll(0):
            connection, index = self._connections.pop(descriptor)
            self._hang_ups.unregister(connection)
            connection.close()
            self._free.append(index)

    def end(self) -> Ended:
        """Send the last wills of a worker that has exited. Closes all but idle connections."""
        ended = Ended()
        for connection, index in self._connections.values():
            slot = Slot(self._memory, index)
            if slot.state == State.IDLE:
                ended.idle.append(connection)
                continue
            if slot.state == State.WILL and _send_last(connection, slot.message):
                ended.num_warned += 1
            elif slot.state != State.CLOSED:
                ended.num_cut += 1
            connection.close()
        asyncio.get_running_loop().remove_reader(self._hang_ups.fileno())
        self._connections.clear()
        self._hang_ups.close()
        self._memory.close()
        os.close(self.memory_file)
        return ended

    def _find_slot(self) -> int:
        if self._free and Slot(self._memory, self._free[0]).state == State.CLOSED:
            index = self._free.popleft()
        elif self._num_slots < self._capacity:
            index = self._num_slots
            self._num_slots += 1
        else:
            return NO_SLOT
        Slot(self._memory, index).state = State.IDLE
        return index


def _send_last(connection: socket.socket, message: bytes) -> bool:
    """Send a message that ends the connection. Returns False if the client does not take it."""
    connection.setblocking(False)
    try:
        if connection.send(message) != len(message):
            return False
        connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(BlockingIOError):
            while connection.recv(2**16):  # the kernel discards the message if data is unread
                pass
    except OSError:
        return False
    return True
