"""What the server's first process and its API workers tell each other, over a pair of connected sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.messages import Failed
from toolkit.metrics.merge import Family
from toolkit.worker import WorkerInfo

M = TypeVar("M")


class Setup(msgspec.Struct, tag="setup"):
    """The first message to a worker: all that it can make ready while the model loads."""

    engine: EngineConfig
    server: ServerConfig
    name: str
    """The model's, in the API."""
    created: int
    folder: str
    tokenizer_folder: str
    client: int
    """Which of the core's front ends the worker is."""


class CoreState(msgspec.Struct):
    """One of the engine's cores."""

    sockets: str = ""
    """The folder of its sockets; empty while none runs in this place."""
    info: WorkerInfo | None = None
    dead: str = ""
    """Why none will."""


class Begin(msgspec.Struct, tag="begin"):
    """The answer to Prepared, as soon as a core runs: requests can come."""

    cores: list[CoreState]


class Drain(msgspec.Struct, tag="drain"):
    """Take no more work in, and say when what was taken in is answered."""


class End(msgspec.Struct, tag="end"):
    """End what still runs with an error that says why, and then the process."""

    reason: str


class Paused(msgspec.Struct, tag="paused"):
    """Cores have died, and others are being started."""

    cores: list[int]


class Revived(msgspec.Struct, tag="revived"):
    """Another core is ready in its place: go on with it."""

    core: int
    sockets: str
    info: WorkerInfo


class Dead(msgspec.Struct, tag="dead"):
    """A core has died for good."""

    core: int
    message: str


class Loads(msgspec.Struct, tag="loads"):
    """How much each of several cores has to do."""

    num_sequences: list[int]


class Count(msgspec.Struct, tag="count"):
    """Tell what you have counted."""


class Exposition(msgspec.Struct, tag="exposition"):
    """The whole server's metrics, as asked for, in Prometheus' text format."""

    text: bytes


class Prepared(msgspec.Struct, tag="prepared"):
    """The worker has made ready what it can without a core."""


class Serving(msgspec.Struct, tag="serving"):
    """The worker answers requests."""

    has_tokenizer: bool
    has_chat_template: bool


class Counted(msgspec.Struct, tag="counted"):
    """What the worker has counted since it began."""

    families: list[Family]


class Expose(msgspec.Struct, tag="expose"):
    """Somebody wants the whole server's metrics."""


class Drained(msgspec.Struct, tag="drained"):
    """Everything that the worker had taken in is answered."""


ToWorker = Setup | Begin | Drain | End | Paused | Revived | Dead | Loads | Count | Exposition
FromWorker = Prepared | Serving | Failed | Counted | Expose | Drained

_HEAD = struct.Struct("<I")


class Channel(Generic[M]):
    """Messages of some kind come in, and any go out: MessagePack, each after its length."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any
    ) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def over(cls, connected: socket.socket, kind: Any) -> Channel[M]:
        """`kind`: of the messages that come."""
        return cls(*await asyncio.open_connection(sock=connected), kind)

    def send(self, message: ToWorker | FromWorker) -> None:
        """Queues a message; nothing when the other side has ended."""
        if not self._writer.is_closing():
            content = self._encoder.encode(message)
            self._writer.write(_HEAD.pack(len(content)) + content)

    async def receive(self) -> M | None:
        """The next message; None when the other side has ended."""
        try:
            [size] = _HEAD.unpack(await self._reader.readexactly(_HEAD.size))
            return self._decoder.decode(await self._reader.readexactly(size))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def close(self) -> None:
        """Closes the socket when all that was queued is sent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
