"""Front ends: the interface between start-up and shutdown, and the front end in one process."""

from __future__ import annotations

import asyncio
import gc
import importlib
import socket
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.cores.launch import smallest_core
from toolkit.errors import ToolkitError
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats, total
from toolkit.speech.messages import SoundLimits
from toolkit.speech.pool import SoundPool
from toolkit.worker import Report, WorkerInfo

if TYPE_CHECKING:
    from toolkit.api.http.stored_responses import Responses
    from toolkit.api.http_server import HTTPServer


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model to serve."""

    engine: EngineConfig
    names: tuple[str, ...]  # in the API
    max_queue: int | None = None  # of this model; the server's limits hold for all together
    max_queue_tokens: int | None = None


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts about a model's folder, as a front end has read it."""

    has_tokenizer: bool
    has_chat_template: bool
    sampling: dict[str, float]  # the model's defaults
    transcribes: bool = False

    @classmethod
    def of(cls, engine: AsyncLLM) -> ModelFacts:
        tokenizer = engine.tokenizer
        has_template = tokenizer is not None and tokenizer.has_chat_template
        return cls(
            tokenizer is not None,
            has_template,
            engine.default_sampling,
            transcribes=engine.inputs.transcribes,
        )


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as it was loaded."""

    setup: ModelSetup
    infos: list[WorkerInfo]  # one per engine core
    facts: ModelFacts

    @property
    def info(self) -> WorkerInfo:
        """Info of the core with the least capacity."""
        return smallest_core(self.infos)


class FrontEnd(Protocol):
    """Serves HTTP requests with engine cores."""

    failed: asyncio.Event  # set when the server has to end
    metrics: Metrics  # of this process, above all of the cores' steps

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of their last steps."""
        ...

    @property
    def failure(self) -> ToolkitError | None:
        """Cause of `failed`."""
        ...

    @property
    def num_active(self) -> int:
        """Requests for model work that are not completely answered."""
        ...

    @property
    def idle_seconds(self) -> float:
        """Time since the last request, 0 while one runs. Only of a front end in one process."""
        ...

    async def start(self, listener: socket.socket, report: Report) -> list[LoadedModel]:
        """Load the models and serve on a bound socket.

        Raises ToolkitError for problems that the user can fix."""
        ...

    async def drain(self) -> None:
        """Refuse new work and wait until all accepted requests are answered."""
        ...

    async def shut_down(self, reason: str) -> None:
        """End open requests with an error that states the reason; close all connections."""
        ...

    async def close(self) -> None:
        """End all processes, at any stage of start-up."""
        ...


class SingleProcess:
    """A front end in this process. Only the cores have their own processes."""

    def __init__(self, setups: Sequence[ModelSetup], server: ServerConfig) -> None:
        self._setups, self._config = setups, server
        self.metrics = Metrics(server.metrics_prefix, setups[0].names[0])
        log = LogStyle.of(server.log_level, server.log_format)
        self._engines = [
            AsyncLLM(config=one.engine, metrics=self.metrics.for_model(one.names[0]), log=log)
            for one in setups
        ]
        self.failed = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._http: HTTPServer | None = None
        self._started: list[AsyncLLM] = []

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of their last steps."""
        return total([engine.stats for engine in self._engines])

    @property
    def failure(self) -> ToolkitError | None:
        """Cause of the death of a model's last core."""
        errors = (engine.fatal_error for engine in self._engines)
        return next(filter(None, errors), None)

    @property
    def num_active(self) -> int:
        """Requests for model work that are not completely answered."""
        return self._http.num_active if self._http is not None else 0

    @property
    def idle_seconds(self) -> float:
        """Time since the last request, 0 while one runs."""
        if self._http is None or self.num_active:
            return 0.0
        return time.monotonic() - self._http.gate.last_used

    async def start(self, listener: socket.socket, report: Report) -> list[LoadedModel]:
        """Load the models, one after the other, and serve."""
        # While the cores start:
        importing = asyncio.create_task(
            asyncio.to_thread(importlib.import_module, "toolkit.api.http_server")
        )
        try:
            for engine in self._engines:
                await engine.start(report)
                self._started.append(engine)
        except BaseException:
            importing.cancel()
            raise
        await importing
        self._http = make_server(self._config, self._setups, self._engines)
        await self._http.start(listener)
        self._watching = asyncio.create_task(self._wait_for_deaths())
        # A full collection of what start-up made takes 0.1 s, and would come every 20 s under load.
        gc.collect()
        gc.freeze()
        return [
            LoadedModel(setup, engine.cores.infos, ModelFacts.of(engine))
            for setup, engine in zip(self._setups, self._engines, strict=True)
        ]

    async def _wait_for_deaths(self) -> None:
        """Set `failed` when a model can run no more."""
        deaths = [asyncio.create_task(engine.died.wait()) for engine in self._engines]
        try:
            await asyncio.wait(deaths, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for death in deaths:
                death.cancel()
        self.failed.set()

    async def drain(self) -> None:
        """Refuse new work and wait until all accepted requests are answered."""
        assert self._http is not None
        await self._http.drain()

    async def shut_down(self, reason: str) -> None:
        """End open requests and close all connections."""
        for engine in self._engines:
            engine.abort_all(reason)
        assert self._http is not None
        await self._http.shut_down()

    async def close(self) -> None:
        """End the cores."""
        if self._watching is not None:
            self._watching.cancel()
        for engine in self._started:
            await engine.shutdown()


def make_server(
    config: ServerConfig,
    setups: Sequence[ModelSetup],
    engines: Sequence[AsyncLLM],
    created: int | None = None,
    expose: Callable[[], Awaitable[bytes]] | None = None,
    responses: Responses | None = None,
    keeper_path: str = "",
) -> HTTPServer:
    """Return an HTTP server for started engines. See `Server`.

    `keeper_path`: see `SoundPool`."""
    from toolkit.api.http.plugins import FrontEndPlugins
    from toolkit.api.http.server import QueueLimits, ServedModel, Server
    from toolkit.api.http_server import HTTPServer

    models = []
    for setup, engine in zip(setups, engines, strict=True):
        limits = None
        if setup.max_queue is not None:
            limits = QueueLimits(setup.max_queue, setup.max_queue_tokens)
        models.append(ServedModel(engine, setup.names, not config.served_model_name, limits))
    strict = any(setup.engine.plugins.strict_plugins for setup in setups)
    plugins = FrontEndPlugins.load(config, strict=strict)
    return HTTPServer(
        Server(
            config,
            models,
            created=created,
            plugins=plugins,
            expose=expose,
            responses=responses,
            sound=_start_sound(config, engines, keeper_path),
        )
    )


def _start_sound(
    config: ServerConfig, engines: Sequence[AsyncLLM], keeper_path: str
) -> SoundPool | None:
    """Start the processes that decode sound files; None if no model hears."""
    if not any(engine.info.hears for engine in engines):
        return None
    limits = SoundLimits(
        max_bytes=config.max_audio_mb * 2**20, max_seconds=config.max_audio_seconds
    )
    pool = SoundPool(limits, keeper_path)
    pool.start()
    return pool
