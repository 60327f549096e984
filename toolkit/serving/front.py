"""Front ends: the interface between start-up and shutdown, and the front end in one process."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.cores.launch import smallest_core
from toolkit.errors import ToolkitError
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats
from toolkit.worker import Report, WorkerInfo

if TYPE_CHECKING:
    from toolkit.api.http_server import HTTPServer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as it was loaded."""

    infos: list[WorkerInfo]  # one per engine core
    has_tokenizer: bool
    has_chat_template: bool
    sampling: dict[str, float]  # the model's defaults

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

    async def start(self, listener: socket.socket, report: Report) -> ServedModel:
        """Load the model and serve on a bound socket.

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

    def __init__(self, engine: EngineConfig, server: ServerConfig, names: tuple[str, ...]) -> None:
        """`names`: the model's names in the API."""
        self._config, self._names = server, names
        self._engine = AsyncLLM(
            config=engine,
            metrics=Metrics(server.metrics_prefix, names[0]),
            log=LogStyle.of(server.log_level, server.log_format),
        )
        self.failed = self._engine.died
        self.metrics = self._engine.metrics
        self._http: HTTPServer | None = None
        self._has_core = False

    @property
    def stats(self) -> EngineStats:
        """Sums over the cores, as of their last steps."""
        return self._engine.stats

    @property
    def failure(self) -> ToolkitError | None:
        """Cause of the death of the last core."""
        return self._engine.fatal_error

    @property
    def num_active(self) -> int:
        """Requests for model work that are not completely answered."""
        return self._http.gate.num_active if self._http is not None else 0

    async def start(self, listener: socket.socket, report: Report) -> ServedModel:
        """Load the model and serve."""
        importing = asyncio.create_task(asyncio.to_thread(_import_server))  # while the cores start
        try:
            await self._engine.start(report)
        except BaseException:
            importing.cancel()
            raise
        self._has_core = True
        make_server = await importing
        self._http = make_server(self._engine, self._names, self._config)
        await self._http.start(listener)
        # A full collection of what start-up made takes 0.1 s, and would come every 20 s under load.
        gc.collect()
        gc.freeze()
        tokenizer = self._engine.tokenizer
        return ServedModel(
            self._engine.cores.infos,
            tokenizer is not None,
            tokenizer is not None and tokenizer.has_chat_template,
            self._engine.default_sampling,
        )

    async def drain(self) -> None:
        """Refuse new work and wait until all accepted requests are answered."""
        assert self._http is not None
        await self._http.drain()

    async def shut_down(self, reason: str) -> None:
        """End open requests and close all connections."""
        self._engine.abort_all(reason)
        assert self._http is not None
        await self._http.shut_down()

    async def close(self) -> None:
        """End the cores."""
        if self._has_core:
            await self._engine.shutdown()


def _import_server() -> Callable[[AsyncLLM, tuple[str, ...], ServerConfig], HTTPServer]:
    from toolkit.api.http.plugins import FrontEndPlugins
    from toolkit.api.http.service import Service
    from toolkit.api.http_server import HTTPServer

    def make(engine: AsyncLLM, names: tuple[str, ...], config: ServerConfig) -> HTTPServer:
        plugins = FrontEndPlugins.load(config, strict=engine.config.plugins.strict_plugins)
        return HTTPServer(Service(engine, names, config=config, plugins=plugins))

    return make
