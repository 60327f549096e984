"""What serves between start-up and the end: the interface, and one process that does it alone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.engine.cores.launch import least
from toolkit.errors import ToolkitError
from toolkit.logs import LogStyle
from toolkit.metrics import Metrics
from toolkit.scheduler.stats import EngineStats
from toolkit.worker import Report, WorkerInfo

if TYPE_CHECKING:
    from toolkit.api.http_server import HTTPServer


@dataclass(frozen=True, slots=True)
class Served:
    """What start-up found out."""

    infos: list[WorkerInfo]
    """Of each of the engine's cores."""
    has_tokenizer: bool
    has_chat_template: bool

    @property
    def info(self) -> WorkerInfo:
        """Of the one that can take least."""
        return least(self.infos)


class Front(Protocol):
    """Answers HTTP requests with the help of engine cores."""

    failed: asyncio.Event
    """Set when it cannot go on."""
    metrics: Metrics
    """What is counted here, of the cores' steps above all."""

    @property
    def stats(self) -> EngineStats:
        """What the cores' last steps told, together."""
        ...

    @property
    def failure(self) -> ToolkitError | None:
        """Why it cannot."""
        ...

    @property
    def num_active(self) -> int:
        """Requests for work that are not answered in full."""
        ...

    async def start(self, listener: socket.socket, report: Report) -> Served:
        """Loads the model and serves on a bound socket. Raises ToolkitError for what the user can mend."""
        ...

    async def drained(self) -> None:
        """Refuses new work, and waits until all that was accepted is answered."""
        ...

    async def end(self, reason: str) -> None:
        """Ends what still runs with an error that says why, and closes the connections."""
        ...

    async def close(self) -> None:
        """Ends all processes, however far start-up has come."""
        ...


class OneProcess:
    """A Front in this process; the cores alone have their own."""

    def __init__(self, engine: EngineConfig, server: ServerConfig, name: str) -> None:
        """`name`: the model's, in the API."""
        self._config, self._name = server, name
        self._engine = AsyncLLM(
            config=engine,
            metrics=Metrics(server.metrics_prefix, name),
            log=LogStyle.of(server.log_level, server.log_format),
        )
        self.failed = self._engine.died
        self.metrics = self._engine.metrics
        self._http: HTTPServer | None = None
        self._has_core = False

    @property
    def stats(self) -> EngineStats:
        """What the cores' last steps told, together."""
        return self._engine.stats

    @property
    def failure(self) -> ToolkitError | None:
        """What the last core died of."""
        return self._engine.dead

    @property
    def num_active(self) -> int:
        """Requests for work that are not answered in full."""
        return self._http.gate.num_active if self._http is not None else 0

    async def start(self, listener: socket.socket, report: Report) -> Served:
        """Loads the model and serves."""
        importing = asyncio.create_task(
            asyncio.to_thread(_import_server)
        )  # beside what the cores import
        try:
            await self._engine.start(report)
        except BaseException:
            importing.cancel()
            raise
        self._has_core = True
        make_server = await importing
        self._http = make_server(self._engine, self._name, self._config)
        await self._http.start(listener)
        tokenizer = self._engine.tokenizer
        return Served(
            [replica.info for replica in self._engine.replicas if replica.info is not None],
            tokenizer is not None,
            tokenizer is not None and tokenizer.has_chat_template,
        )

    async def drained(self) -> None:
        """Refuses new work, and waits until all that was accepted is answered."""
        assert self._http is not None
        await self._http.drained()

    async def end(self, reason: str) -> None:
        """Ends what still runs."""
        self._engine.abort_all(reason)
        assert self._http is not None
        await self._http.end()

    async def close(self) -> None:
        """Ends the cores."""
        if self._has_core:
            await self._engine.shutdown()


def _import_server() -> Callable[[AsyncLLM, str, ServerConfig], HTTPServer]:
    from toolkit.api.http.service import Service
    from toolkit.api.http_server import HTTPServer

    return lambda engine, name, config: HTTPServer(Service(engine, name, config=config))
