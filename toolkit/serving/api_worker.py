"""One of several processes that answer a server's requests: `python -m toolkit.serving.api_worker DESCRIPTOR`, started by
`Supervisor`, with the channel to it as standard input and the socket over which connections come as DESCRIPTOR.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import uvloop

from toolkit.api.http.service import Service
from toolkit.api.http_server import HTTPServer
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.cores.core_client import CoreLink
from toolkit.engine.cores.launch import least
from toolkit.engine.input_processor import InputProcessor
from toolkit.engine.messages import Failed
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.metrics.merge import snapshot
from toolkit.serving.control import (
    Begin,
    Channel,
    Count,
    Counted,
    Dead,
    Drain,
    Drained,
    End,
    Expose,
    Exposition,
    Loads,
    Paused,
    Prepared,
    Revived,
    Serving,
    Setup,
    ToWorker,
)
from toolkit.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

CONNECTIONS_PER_TURN = 32


class Worker:
    """Answers the requests of the connections that it is handed."""

    def __init__(self, channel: Channel[ToWorker], connections: socket.socket) -> None:
        self._channel = channel
        self._connections = connections
        self._scrapes: list[asyncio.Future[bytes]] = []
        """Who waits for the whole server's metrics."""
        self._draining: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Until the first process says so, or ends. What keeps the worker from serving is told to it."""
        try:
            await self._start()
            await self._obey()
        except ToolkitError as error:
            self._channel.send(Failed(type(error).__name__, error.message))
        await self._channel.close()

    async def _start(self) -> None:
        setup = await self._next()
        assert isinstance(setup, Setup)
        LogStyle.of(setup.server.log_level, setup.server.log_format).apply()
        template = setup.engine.model.chat_template
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(setup.tokenizer_folder), template)
        self._channel.send(Prepared())
        begin = await self._next()
        assert isinstance(begin, Begin)
        metrics = Metrics(setup.server.metrics_prefix, setup.name)
        self._engine = AsyncLLM(config=setup.engine, metrics=metrics)
        self._client = setup.client
        cores = [
            None if core.info is None else (self._link(core.sockets), core.info)
            for core in begin.cores
        ]
        info = least([core.info for core in begin.cores if core.info is not None])
        self._engine.attach(cores, InputProcessor(Path(setup.folder), tokenizer, info))
        for index, core in enumerate(begin.cores):
            if core.info is not None:
                self._engine.read(index).add_done_callback(_end_if_failed)
            elif core.dead:
                self._engine.lose(index, EngineDeadError(core.dead))
        service = Service(self._engine, setup.name, setup.created, self._expose, setup.server)
        self._http = HTTPServer(service)
        await self._http.start()
        asyncio.get_running_loop().add_reader(self._connections, self._take_connections)
        has_template = tokenizer is not None and tokenizer.has_chat_template
        self._channel.send(Serving(tokenizer is not None, has_template))

    async def _obey(self) -> None:
        while True:
            message = await self._next()
            if isinstance(message, Count):
                self._channel.send(Counted(snapshot(self._engine.metrics.registry)))
            elif isinstance(message, Exposition):
                self._give(message.text)
            elif isinstance(message, Drain):
                self._draining = asyncio.create_task(self._drain())
            elif isinstance(message, Paused):
                self._engine.pause(*message.cores)
            elif isinstance(message, Revived):
                self._engine.resume(message.core, self._link(message.sockets), message.info)
                self._engine.read(message.core).add_done_callback(_end_if_failed)
            elif isinstance(message, Dead):
                self._engine.lose(message.core, EngineDeadError(message.message))
                if self._engine.dead is not None:
                    self._http.gate.door.draining = True
            elif isinstance(message, Loads):
                self._engine.observe_loads(message.num_sequences)
            elif isinstance(message, End):
                self._engine.abort_all(message.reason)
                await self._http.end()
                await self._engine.shutdown()
                return

    def _link(self, sockets: str) -> CoreLink:
        link = CoreLink(sockets, self._client)
        link.listen()
        return link

    async def _next(self) -> ToWorker:
        """The next message. The worker ends at once when the first process has, however that died."""
        message = await self._channel.receive()
        if message is None:
            os._exit(1)
        return message

    async def _drain(self) -> None:
        await self._http.drained()
        self._channel.send(Drained())

    async def _expose(self) -> bytes:
        """The whole server's metrics: the first process gathers them."""
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._scrapes:
            self._channel.send(Expose())
        self._scrapes.append(waiting)
        return await waiting

    def _give(self, text: bytes) -> None:
        waiting, self._scrapes = self._scrapes, []
        for scrape in waiting:
            if not scrape.done():
                scrape.set_result(text)

    def _take_connections(self) -> None:
        for _ in range(CONNECTIONS_PER_TURN):
            try:
                _, descriptors, _, _ = socket.recv_fds(self._connections, 1, 1)
            except BlockingIOError:
                return
            except OSError:  # the first process has ended, which the channel tells
                descriptors = []
            if not descriptors:
                asyncio.get_running_loop().remove_reader(self._connections)
                return
            connection = socket.socket(fileno=descriptors[0])
            connection.setblocking(False)
            self._http.serve(connection)


def _end_if_failed(reading: asyncio.Task[None]) -> None:
    """A worker that cannot take in what the core sends would only refuse its share of the connections: it ends, and
    another takes its place.
    """
    if not reading.cancelled() and (error := reading.exception()) is not None:
        _end_with(error)


def _end_with(error: BaseException) -> NoReturn:
    logger.critical("this process ends, and another takes its place", exc_info=error)
    sys.stderr.flush()
    os._exit(1)


async def _run(channel: socket.socket, connections: socket.socket) -> None:
    await Worker(await Channel[ToWorker].over(channel, ToWorker), connections).run()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process drains on these, and says so
        signal.signal(number, signal.SIG_IGN)
    channel, connections = socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1]))
    for inherited in (channel, connections):
        inherited.setblocking(False)
    try:
        uvloop.run(_run(channel, connections))
    except Exception as error:
        _end_with(error)


if __name__ == "__main__":
    main()
