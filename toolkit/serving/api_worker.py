"""API worker: one of several processes that serve HTTP requests.

`Supervisor` runs `python -m toolkit.serving.api_worker CONNECTIONS [WILLS]`. Standard input is the
control channel, CONNECTIONS the descriptor of the socket over which it hands over connections,
WILLS that of the memory of their last wills, if it keeps them."""

import asyncio
import gc
import logging
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import uvloop

from toolkit.api.http.connections.last_will import NO_SLOT, Slot
from toolkit.api.http.connections.listener import CONNECTIONS_PER_TURN, RETRY_INTERVAL
from toolkit.api.http_server import HTTPServer
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.cores.core_client import CoreLink
from toolkit.engine.cores.launch import smallest_core
from toolkit.engine.front.input_processor import InputProcessor
from toolkit.engine.front.pictures import make_pictures
from toolkit.engine.messages import Failed
from toolkit.errors import EngineDeadError, ToolkitError
from toolkit.logs import LogStyle, flush_stderr
from toolkit.metrics import Metrics
from toolkit.metrics.merge import snapshot
from toolkit.sampling.logits_processors import preload
from toolkit.serving.control import (
    ControlChannel,
    CoreAddress,
    CoreDead,
    CoreLoads,
    CoreRestarted,
    CoresPaused,
    Drain,
    Drained,
    Exposition,
    FoundModel,
    GetExposition,
    GetMetrics,
    Prepared,
    Serving,
    Setup,
    ShutDown,
    StartServing,
    ToWorker,
    WorkerMetrics,
)
from toolkit.serving.front import ModelFacts, make_server
from toolkit.serving.shared_responses import ResponseAnswer, SharedResponses
from toolkit.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


class APIWorker:
    """Serves the connections that the first process hands over."""

    def __init__(
        self,
        channel: ControlChannel[ToWorker],
        connections: socket.socket,
        wills: mmap.mmap | None,
    ) -> None:
        self._channel = channel
        self._connections, self._wills = connections, wills
        self._scrapes: list[asyncio.Future[bytes]] = []  # waiting for an Exposition
        self._responses = SharedResponses(channel.send)
        self._draining: asyncio.Task[None] | None = None
        self._http: HTTPServer

    async def run(self) -> None:
        """Serve until the first process sends ShutDown. Report an error of start-up to it."""
        try:
            await self._start()
            await self._handle_messages()
        except ToolkitError as error:
            self._channel.send(Failed(type(error).__name__, error.message))
        await self._channel.close()

    async def _start(self) -> None:
        setup = await self._receive()
        assert isinstance(setup, Setup)
        LogStyle.of(setup.server.log_level, setup.server.log_format).apply()
        self._client, setups = setup.client, [model.setup for model in setup.models]
        self._keeper_path = setup.keeper_path
        tokenizers = []
        for model in setup.models:
            config = model.setup.engine
            tokenizers.append(
                await asyncio.to_thread(
                    load_tokenizer, Path(model.tokenizer_folder), config.model.chat_template
                )
            )
            await asyncio.to_thread(preload, config.plugins)
        self._channel.send(Prepared())
        start = await self._receive()
        assert isinstance(start, StartServing)
        self._metrics = Metrics(setup.server.metrics_prefix, setups[0].names[0])
        self._engines = [
            self._connect(*one) for one in zip(setup.models, tokenizers, start.cores, strict=True)
        ]
        self._http = make_server(
            setup.server,
            setups,
            self._engines,
            setup.created,
            self._expose,
            self._responses,
            self._keeper_path,
        )
        await self._http.start()
        gc.collect()
        gc.freeze()  # see SingleProcess.start
        self._start_taking()
        self._channel.send(Serving([ModelFacts.of(engine) for engine in self._engines]))

    def _connect(
        self, model: FoundModel, tokenizer: Tokenizer | None, addresses: list[CoreAddress]
    ) -> AsyncLLM:
        """Return the engine of a model, on cores that the first process has started."""
        file = Path(model.adapter_file) if model.adapter_file else None
        metrics = self._metrics.for_model(model.setup.names[0])
        engine = AsyncLLM(config=model.setup.engine, metrics=metrics, adapter_file=file)
        cores = [
            None if core.info is None else (self._link(core.sockets), core.info)
            for core in addresses
        ]
        info = smallest_core([core.info for core in addresses if core.info is not None])
        pictures = make_pictures(info.sight, engine.config.pictures, keeper_path=self._keeper_path)
        inputs = InputProcessor(Path(model.folder), tokenizer, info, engine.config.model, pictures)
        engine.connect_cores(cores, inputs)
        for index, core in enumerate(addresses):
            if core.info is not None:
                engine.cores.watch(index).add_done_callback(_exit_if_failed)
            elif core.dead:
                engine.cores.remove(index, EngineDeadError(core.dead))
        return engine

    async def _handle_messages(self) -> None:
        while True:
            message = await self._receive()
            if isinstance(message, GetMetrics):
                self._channel.send(WorkerMetrics(snapshot(self._metrics.registry)))
            elif isinstance(message, Exposition):
                self._finish_scrapes(message.text)
            elif isinstance(message, ResponseAnswer):
                self._responses.receive(message)
            elif isinstance(message, Drain):
                self._draining = asyncio.create_task(self._drain())
            elif isinstance(message, CoresPaused):
                self._engines[message.model].cores.pause(*message.cores)
            elif isinstance(message, CoreRestarted):
                link, cores = self._link(message.sockets), self._engines[message.model].cores
                cores.replace(message.core, link, message.info)
                cores.watch(message.core).add_done_callback(_exit_if_failed)
            elif isinstance(message, CoreDead):
                cores = self._engines[message.model].cores
                cores.remove(message.core, EngineDeadError(message.message))
                if any(engine.fatal_error is not None for engine in self._engines):
                    self._http.gate.access_control.is_draining = True
            elif isinstance(message, CoreLoads):
                self._engines[message.model].observe_loads(message.num_sequences)
            elif isinstance(message, ShutDown):
                for engine in self._engines:
                    engine.abort_all(message.reason)
                await self._http.shut_down()
                for engine in self._engines:
                    await engine.shutdown()
                return

    def _link(self, sockets: str) -> CoreLink:
        link = CoreLink(sockets, self._client)
        link.listen()
        return link

    async def _receive(self) -> ToWorker:
        """Return the next message. Exit at once if the first process has ended, in any way."""
        message = await self._channel.receive()
        if message is None:
            os._exit(1)
        return message

    async def _drain(self) -> None:
        await self._http.drain()
        self._channel.send(Drained())

    async def _expose(self) -> bytes:
        """Return the metrics of all processes, which the first process collects."""
        scrape: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if not self._scrapes:
            self._channel.send(GetExposition())
        self._scrapes.append(scrape)
        return await scrape

    def _finish_scrapes(self, text: bytes) -> None:
        scrapes, self._scrapes = self._scrapes, []
        for scrape in scrapes:
            if not scrape.done():
                scrape.set_result(text)

    def _start_taking(self) -> None:
        asyncio.get_running_loop().add_reader(self._connections, self._take_connections)

    def _take_connections(self) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(CONNECTIONS_PER_TURN):
            if not self._http.has_room():  # connections wait in the socket, then in the backlog
                loop.remove_reader(self._connections)
                loop.call_later(RETRY_INTERVAL, self._start_taking)
                return
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connections, 4, 1)
            except BlockingIOError:
                return
            except OSError:  # the first process has ended; the channel reports it
                data = b""
            if not data:
                loop.remove_reader(self._connections)
                return
            slot = None
            if self._wills is not None and (number := int.from_bytes(data, "little")) != NO_SLOT:
                slot = Slot(self._wills, number)
            for descriptor in descriptors:
                self._http.serve(socket.socket(fileno=descriptor), slot)


def _exit_if_failed(reading: asyncio.Task[None]) -> None:
    """Exit, to be replaced, if a core's messages cannot be read: every request would fail."""
    if not reading.cancelled() and (error := reading.exception()) is not None:
        _exit_with(error)


def _exit_with(error: BaseException) -> NoReturn:
    logger.critical("internal error: this API worker exits and is replaced", exc_info=error)
    flush_stderr()
    os._exit(1)


async def _run(channel: socket.socket, connections: socket.socket, wills: mmap.mmap | None) -> None:
    control = await ControlChannel[ToWorker].over(channel, ToWorker)
    await APIWorker(control, connections, wills).run()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the first process handles them
        signal.signal(number, signal.SIG_IGN)
    channel, connections = socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(sys.argv[1]))
    for inherited in (channel, connections):
        inherited.setblocking(False)
    wills = mmap.mmap(int(sys.argv[2]), 0) if len(sys.argv) > 2 else None
    try:
        uvloop.run(_run(channel, connections, wills))
    except Exception as error:
        _exit_with(error)


if __name__ == "__main__":
    main()
