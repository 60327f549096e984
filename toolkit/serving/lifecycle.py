"""From the command line to a serving process and, on SIGTERM, to an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from toolkit.api.http.listener import listen, tls
from toolkit.config import EngineConfig, ServerConfig
from toolkit.errors import ConfigError
from toolkit.logs import LogStyle
from toolkit.serving.front import Front, OneProcess
from toolkit.serving.ready_card import ready_card
from toolkit.serving.stats_log import describe, tell_stats
from toolkit.serving.supervisor import Supervisor

logger = logging.getLogger(__name__)

DEMO_NAME = "tk-demo"


async def serve(engine: EngineConfig, config: ServerConfig, began: float) -> int:
    """Serves until a signal; then finishes what was accepted. `began`: when the user began to wait, as `time.perf_counter` has it.

    Returns the exit code: 130 after Ctrl-C while it started. Raises ToolkitError for what the user can mend, and EngineDeadError when the
    engine dies.
    """
    LogStyle.of(config.log_level, config.log_format).apply()
    config = _with_keys_of_file(config)
    tls(config)  # what is wrong with its files is told before a model is loaded
    with listen(config) as listener:
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
                return 130 if stop.first == signal.SIGINT else 0
            ready_card(starting.result(), name, listener, config, time.perf_counter() - began)
            describe(front, engine, starting.result())
            telling = asyncio.create_task(tell_stats(front, log=not config.disable_log_stats))
            _notify("READY=1")
            await _until_over(front, config.shutdown_timeout, stop)
            telling.cancel()
            return 0
        finally:
            await front.close()


def _make_front(engine: EngineConfig, config: ServerConfig, name: str) -> Front:
    if config.api_workers == 1:
        return OneProcess(engine, config, name)
    return Supervisor(engine, config, name)


async def _until_over(front: Front, timeout: float, stop: _Signals) -> None:
    """Serves until a signal or a failure, and ends in order. Raises the failure."""
    failing = asyncio.create_task(front.failed.wait())
    await asyncio.wait(
        {failing, asyncio.create_task(stop.event.wait())}, return_when=asyncio.FIRST_COMPLETED
    )
    if not failing.done():
        _notify("STOPPING=1")
        draining, hurrying = (
            asyncio.create_task(front.drained()),
            asyncio.create_task(stop.second.wait()),
        )
        counting = asyncio.create_task(_count_down(front, timeout))
        await asyncio.wait(
            {failing, draining, hurrying}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED
        )
        counting.cancel()
    await front.end("The server is shutting down, and the time that running requests get is over.")
    if front.failure is not None:
        raise front.failure


async def _count_down(front: Front, timeout: float) -> None:
    """Says how many requests are left and how long they have: often enough on a terminal, now and then in a log."""
    deadline = time.monotonic() + timeout
    interval = 1.0 if sys.stderr.isatty() else 10.0
    while True:
        left = max(0, math.ceil(deadline - time.monotonic()))
        logger.info(
            "shutting down: %d open requests have %d s to finish; another signal ends them at once",
            front.num_active,
            left,
        )
        await asyncio.sleep(interval)


def _with_keys_of_file(config: ServerConfig) -> ServerConfig:
    """The keys of --api-key-file beside the others. Raises ConfigError for a file without any."""
    if config.api_key_file is None:
        return config
    try:
        lines = [line.strip() for line in Path(config.api_key_file).read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--api-key-file {config.api_key_file} cannot be read: {error}.", param="api_key_file"
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"--api-key-file {config.api_key_file} has no key.", param="api_key_file")
    return dataclasses.replace(config, api_key=(*config.api_key, *keys))


def _notify(state: str) -> None:
    """Tells systemd, when it wants to know (sd_notify(3)): a datagram to the socket that it names."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.connect("\0" + path[1:] if path.startswith("@") else path)
            sender.send(state.encode())


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
        self.first: signal.Signals | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note, number)

    def _note(self, number: signal.Signals) -> None:
        self.first = self.first or number
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


def _report(phase: str, seconds: float) -> None:
    sys.stderr.write(
        f"  {phase:<12}{seconds:7.2f} s\n"
    )  # in one piece: the core logs to the same terminal
