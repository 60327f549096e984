"""Messages between the server's first process and its API workers, over pairs of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any, Generic, TypeVar

import msgspec

from toolkit.config import ServerConfig
from toolkit.engine.messages import Failed
from toolkit.framing import frame, read_frame
from toolkit.metrics.merge import Family
from toolkit.serving.front import ModelFacts, ModelSetup
from toolkit.serving.shared_responses import ResponseAnswer, ResponseQuery
from toolkit.worker import WorkerInfo

M = TypeVar("M")


class FoundModel(msgspec.Struct):
    """A model, and where its files are."""

    setup: ModelSetup
    folder: str
    tokenizer_folder: str
    adapter_file: str = ""  # see `AdapterRegistry`; empty: there are no adapters


class Setup(msgspec.Struct, tag="setup"):
    """First message to a worker: all it needs to prepare while the models load."""

    models: list[FoundModel]
    server: ServerConfig
    created: int
    client: int  # the worker's number among the clients of a core
    keeper_path: str  # socket of the first process's `KeeperServer`, for pictures


class CoreAddress(msgspec.Struct):
    """Address of an engine core for a worker."""

    sockets: str = ""  # folder of its sockets; empty while it does not run
    info: WorkerInfo | None = None
    dead: str = ""  # why it will not run again


class StartServing(msgspec.Struct, tag="start"):
    """Reply to Prepared as soon as each model has a core: serve connections."""

    cores: list[list[CoreAddress]]  # of each model


class Drain(msgspec.Struct, tag="drain"):
    """Refuse new work, and send Drained when all accepted requests are answered."""


class ShutDown(msgspec.Struct, tag="shut_down"):
    """End all open requests with an error that states the reason, then exit."""

    reason: str


class CoresPaused(msgspec.Struct, tag="paused"):
    """Cores have died and are being restarted."""

    model: int
    cores: list[int]


class CoreRestarted(msgspec.Struct, tag="restarted"):
    """A new core runs in place of a dead one: resubmit its requests."""

    model: int
    core: int
    sockets: str
    info: WorkerInfo


class CoreDead(msgspec.Struct, tag="dead"):
    """A core has died and is not restarted."""

    model: int
    core: int
    message: str


class CoreLoads(msgspec.Struct, tag="loads"):
    """Load of each of several cores."""

    model: int
    num_sequences: list[int]


class GetMetrics(msgspec.Struct, tag="get_metrics"):
    """Send WorkerMetrics."""


class Exposition(msgspec.Struct, tag="exposition"):
    """Reply to GetExposition: metrics of all processes, in Prometheus' text format."""

    text: bytes


class Prepared(msgspec.Struct, tag="prepared"):
    """The worker has prepared all that does not need a core."""


class Serving(msgspec.Struct, tag="serving"):
    """The worker serves requests."""

    models: list[ModelFacts]


class WorkerMetrics(msgspec.Struct, tag="metrics"):
    """Metrics of the worker since its start."""

    families: list[Family]


class GetExposition(msgspec.Struct, tag="get_exposition"):
    """A client wants the metrics of all processes."""


class Drained(msgspec.Struct, tag="drained"):
    """All requests that the worker had accepted are answered."""


ToWorker = (
    Setup
    | StartServing
    | Drain
    | ShutDown
    | CoresPaused
    | CoreRestarted
    | CoreDead
    | CoreLoads
    | GetMetrics
    | Exposition
    | ResponseAnswer
)
FromWorker = Prepared | Serving | Failed | WorkerMetrics | GetExposition | Drained | ResponseQuery


class ControlChannel(Generic[M]):
    """One end of the connection. Receives messages of type M, as framed MessagePack."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Any
    ) -> None:
        self._reader, self._writer = reader, writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(kind)

    @classmethod
    async def over(cls, connected: socket.socket, kind: Any) -> ControlChannel[M]:
        """Return a channel over a connected socket. `kind`: type of the received messages."""
        return cls(*await asyncio.open_connection(sock=connected), kind)

    def send(self, message: ToWorker | FromWorker) -> None:
        """Queue a message; do nothing if the other process has ended."""
        if not self._writer.is_closing():
            self._writer.write(frame(self._encoder.encode(message)))

    async def receive(self) -> M | None:
        """Return the next message, or None if the other process has ended."""
        try:
            return self._decoder.decode(await read_frame(self._reader))
        except (asyncio.IncompleteReadError, OSError):
            return None

    async def close(self) -> None:
        """Close the socket when all queued messages are sent."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
