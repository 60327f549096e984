"""Framing of messages on a stream of bytes: the length in eight bytes, then the message."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

HEADER = struct.Struct("<Q")


def frame(message: bytes) -> bytes:
    """Return a message with its header."""
    return HEADER.pack(len(message)) + message


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """Return the next message. Raises asyncio.IncompleteReadError at the end of the stream."""
    (length,) = HEADER.unpack(await stream.readexactly(HEADER.size))
    return await stream.readexactly(length)
