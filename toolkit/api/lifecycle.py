"""From the command line to a serving process and, on SIGTERM, to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psutil
import uvicorn

from toolkit.api.card import ready_card
from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.async_llm import AsyncLLM
from toolkit.errors import ConfigError, EngineDeadError
from toolkit.metrics import Metrics

logger = logging.getLogger(__name__)

DEMO_NAME = "tk-demo"


async def serve(engine_config: EngineConfig, config: ServerConfig) -> None:
    """Serves until a signal; then finishes what was accepted. Raises ToolkitError for what the user can mend,
    and EngineDeadError when the engine dies.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    started = time.perf_counter()
    with bind(config.host, config.port) as listener:
        name = config.served_model_name or engine_config.model.model or DEMO_NAME
        engine = AsyncLLM.from_config(
            engine_config, metrics=Metrics(config.metrics_prefix, name), log_level=config.log_level
        )
        stop = _Signals()
        starting = asyncio.create_task(engine.start(_report))
        if not await stop.unless(starting):
            starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await starting
            return
        try:
            await _run(engine, name, config, listener, stop, started)
        finally:
            await engine.shutdown()


async def _run(
    engine: AsyncLLM, name: str, config: ServerConfig, listener: socket.socket, stop: _Signals, started: float
) -> None:
    from toolkit.api.app import make_app
    from toolkit.api.service import Service

    gate = make_app(Service(engine, name), config.api_key)
    # uvicorn waits for open connections without a limit of its own: `_drain` is the limit.
    server = _Server(
        uvicorn.Config(
            gate,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=75,
            lifespan="off",
            server_header=False,
        )
    )
    # Its connections inherit this: those that linger must not keep the next server from the port.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    host, port = listener.getsockname()[:2]
    ready_card(engine, name, host, port, config, time.perf_counter() - started)
    dying = asyncio.create_task(_until_dead(engine))
    stopping = asyncio.create_task(stop.event.wait())
    await asyncio.wait({serving, dying, stopping}, return_when=asyncio.FIRST_COMPLETED)
    gate.draining = True
    if stopping.done() and not dying.done():
        logger.info(
            "shutting down: %d requests to finish, at most %g s", gate.num_active, config.shutdown_timeout
        )
        await _drain(gate, config.shutdown_timeout, stop)
    for task in (dying, stopping):
        task.cancel()
    engine.abort_all("The server is shutting down, and the time that running requests get is over.")
    server.should_exit = True
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(serving, 10.0)
    if isinstance(engine.dead, EngineDeadError):
        raise engine.dead


async def _drain(gate: object, timeout: float, stop: _Signals) -> None:
    """Waits until every accepted request is answered, the time is over, or a second signal comes."""
    deadline = time.monotonic() + timeout
    while getattr(gate, "num_active", 0) and time.monotonic() < deadline and stop.count < 2:
        await asyncio.sleep(0.02)


async def _until_dead(engine: AsyncLLM) -> None:
    await engine.died.wait()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Signals:
    """SIGTERM and Ctrl-C, counted."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.count = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        self.count += 1
        self.event.set()

    async def unless(self, task: asyncio.Task[None]) -> bool:
        """Waits for a task; False when a signal came first. Raises what the task raised."""
        waiting = asyncio.create_task(self.event.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
            return True
        return False


@contextlib.contextmanager
def bind(host: str, port: int) -> Iterator[socket.socket]:
    """A bound socket, closed at the end. Raises ConfigError naming the process that has the port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host}: {error.strerror}.", param="host") from None
    listener = socket.socket(family, kind)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind(address)
        # Until it listens, another server could bind beside it, and fail when both have loaded their models.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    except OSError as error:
        listener.close()
        if isinstance(error, PermissionError):
            raise ConfigError(
                f"Port {port} is not for ordinary users: use --port 1024 or above.", param="port"
            ) from None
        raise ConfigError(
            f"{host}:{port} cannot be listened on: {(error.strerror or str(error)).lower()}{_holder(port)}. "
            "Use --port for another; 0 takes a free one.",
            param="port",
        ) from None
    try:
        yield listener
    finally:
        listener.close()


def _holder(port: int) -> str:
    """Which process listens on a port, as far as the system tells."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid:
                command = " ".join(psutil.Process(connection.pid).cmdline())[:80]
                return f", by process {connection.pid} ({command})"
    return ""


def _report(phase: str, seconds: float) -> None:
    sys.stderr.write(f"  {phase:<12}{seconds:7.2f} s\n")  # in one piece: the core logs to the same terminal
