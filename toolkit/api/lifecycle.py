"""From the command line to a serving process and, on SIGTERM, to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import psutil

from toolkit.api.card import ready_card
from toolkit.api.front import Front, OneProcess
from toolkit.api.supervisor import Supervisor
from toolkit.config import EngineConfig, ServerConfig
from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

DEMO_NAME = "tk-demo"


async def serve(engine: EngineConfig, config: ServerConfig) -> None:
    """Serves until a signal; then finishes what was accepted. Raises ToolkitError for what the user can mend,
    and EngineDeadError when the engine dies.
    """
    logging.basicConfig(level=config.log_level.upper(), format="%(levelname)s %(name)s: %(message)s")
    started = time.perf_counter()
    with bind(config.host, config.port) as listener:
        _allow_many_connections()
        name = config.served_model_name or engine.model.model or DEMO_NAME
        front = _make_front(engine, config, name)
        stop = _Signals()
        try:
            starting = asyncio.create_task(front.start(listener, _report))
            if not await stop.unless(starting):
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return
            host, port = listener.getsockname()[:2]
            ready_card(starting.result(), name, host, port, config, time.perf_counter() - started)
            await _until_over(front, config.shutdown_timeout, stop)
        finally:
            await front.close()


def _make_front(engine: EngineConfig, config: ServerConfig, name: str) -> Front:
    if config.api_workers == 1:
        return OneProcess(engine, config, name)
    return Supervisor(engine, config, name)


async def _until_over(front: Front, timeout: float, stop: _Signals) -> None:
    """Serves until a signal or a failure, and ends in order. Raises the failure."""
    failing = asyncio.create_task(front.failed.wait())
    await asyncio.wait({failing, asyncio.create_task(stop.event.wait())}, return_when=asyncio.FIRST_COMPLETED)
    if not failing.done():
        logger.info("shutting down: running requests have at most %g s to finish", timeout)
        draining, hurrying = asyncio.create_task(front.drained()), asyncio.create_task(stop.second.wait())
        await asyncio.wait(
            {failing, draining, hurrying}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
    await front.end("The server is shutting down, and the time that running requests get is over.")
    if front.failure is not None:
        raise front.failure


def _allow_many_connections() -> None:
    """As many open files as the system allows at all: each connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class _Signals:
    """SIGTERM and Ctrl-C, counted."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.second = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self.second if self.event.is_set() else self.event).set()

    async def unless(self, task: asyncio.Task[Any]) -> bool:
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
