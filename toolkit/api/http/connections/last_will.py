"""Last will of a connection: the bytes that its client gets if the API worker dies.

The worker writes it to memory that it shares with the first process, which has a copy of the
connection's descriptor. A connection without a will is closed."""

from __future__ import annotations

import mmap
from enum import IntEnum

SLOT_BYTES = 1024  # per connection: state, length of the message (2 bytes), message
NO_SLOT = 2**32 - 1
_HEAD = 3


class State(IntEnum):
    """State of a connection, seen from its client."""

    IDLE = 0  # it expects no answer: another worker can take the connection
    WILL = 1  # the message can be sent: all that was sent before is complete
    CUT = 2  # an answer is incomplete
    CLOSED = 3  # the worker has closed it, and does not write to the slot any more


class Slot:
    """A connection's part of the shared memory."""

    __slots__ = ("_memory", "_offset")

    def __init__(self, memory: mmap.mmap, index: int) -> None:
        self._memory: mmap.mmap | bytearray = memory
        self._offset = index * SLOT_BYTES

    @property
    def state(self) -> int:
        """One of State. A plain number, because it is read and written for each event."""
        return self._memory[self._offset]

    @state.setter
    def state(self, state: int) -> None:
        self._memory[self._offset] = state

    @property
    def message(self) -> bytes:
        """The last message that was stored."""
        start = self._offset + _HEAD
        size = int.from_bytes(self._memory[start - 2 : start], "little")
        return bytes(self._memory[start : start + size])

    def store(self, message: bytes) -> bool:
        """Store a message; the state becomes CUT. Returns False if the message is too long."""
        self.state = State.CUT
        if len(message) > SLOT_BYTES - _HEAD:
            return False
        start = self._offset + _HEAD
        self._memory[start - 2 : start] = len(message).to_bytes(2, "little")
        self._memory[start : start + len(message)] = message
        return True

    def close(self) -> None:
        """Set CLOSED, and leave the slot to its next connection."""
        self.state = State.CLOSED
        self._memory, self._offset = bytearray(SLOT_BYTES), 0
