"""Life of a server: from the command line to serving and, on SIGTERM, to an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from toolkit.api.http.connections.listener import listen, raise_file_limit
from toolkit.config import EngineConfig, ServerConfig
from toolkit.config.engine import DEMO
from toolkit.hub import download_missing
from toolkit.logs import LogStyle, flush_stderr, writes_json
from toolkit.running import RunningServer, State, listed, model_identity
from toolkit.serving.checks import check_server_settings
from toolkit.serving.front import FrontEnd, ModelSetup, SingleProcess
from toolkit.serving.ready_card import client_url, print_ready_card
from toolkit.serving.stats_log import log_stats, set_info_metrics
from toolkit.serving.supervisor import Supervisor

logger = logging.getLogger(__name__)

MAX_SLEEP = 86_400.0  # seconds; an event loop cannot wait forever


async def serve(engine: EngineConfig, config: ServerConfig, started_at: float) -> int:
    """Serve until a signal, then finish all accepted requests.

    `started_at`: start of the command, by `time.perf_counter`. Returns the exit code: 130 after
    Ctrl-C during start-up. Raises ToolkitError for problems that the user can fix, and
    EngineDeadError when the engine dies."""
    LogStyle.of(config.log_level, config.log_format).apply()
    config, names = check_server_settings(engine, config)
    with (
        listen(config) as listener,
        listed(_record(listener, engine, config, names)) as set_state,
    ):
        raise_file_limit()
        warn_of_open_adapters(engine, config, listener)
        warn_of_visible_keys(sys.argv)
        # In the main thread, which Ctrl-C can end. Nothing else runs yet.
        download_missing(engine.model.model, engine.model.revision)
        front = _make_front_end([ModelSetup(engine, names)], config)
        signals = _Signals()
        try:
            starting = asyncio.create_task(front.start(listener, _report))
            if not await signals.wait_for(starting):
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                return 130 if signals.first == signal.SIGINT else 0
            models = starting.result()
            print_ready_card(models[0], listener, config, time.perf_counter() - started_at)
            set_info_metrics(front, models)
            logging_stats = asyncio.create_task(log_stats(front, log=not config.disable_log_stats))
            set_state("ready")
            flush_stderr()  # `tk serve --detach` shows the log up to here
            _notify_systemd("READY=1")
            await serve_until_stopped(front, config, signals, set_state)
            logging_stats.cancel()
            return 0
        finally:
            await front.close()


def warn_of_open_adapters(
    engine: EngineConfig, config: ServerConfig, listener: socket.socket
) -> None:
    """Warn if clients on other machines may load adapters."""
    if not engine.lora.allow_runtime_lora or config.admin_key is not None:
        return
    is_ip = listener.family in (socket.AF_INET, socket.AF_INET6)
    if is_ip and not ipaddress.ip_address(listener.getsockname()[0]).is_loopback:
        logger.warning(
            "--allow-runtime-lora without --admin-key: every %s can load and unload adapters. Set "
            "--admin-key or TK_ADMIN_KEY.",
            "API key" if config.api_key else "client",
        )


def warn_of_visible_keys(arguments: Sequence[str]) -> None:
    """Warn of keys on the command line."""
    if any(one.partition("=")[0] in ("--api-key", "--admin-key") for one in arguments):
        logger.warning(
            "ps shows a key on the command line to every user of this machine; TK_API_KEY, "
            "TK_ADMIN_KEY and --api-key-file do not"
        )


def _make_front_end(setups: Sequence[ModelSetup], config: ServerConfig) -> FrontEnd:
    return (SingleProcess if config.api_workers == 1 else Supervisor)(setups, config)


def _record(
    listener: socket.socket, engine: EngineConfig, config: ServerConfig, names: Sequence[str]
) -> RunningServer:
    """Return the server's record for the clients on this machine."""
    host, port = (None, None) if config.uds is not None else listener.getsockname()[:2]
    return RunningServer(
        model=model_identity(engine.model.model or DEMO),
        names=tuple(names),
        url=client_url(listener, config),
        host=host,
        port=port,
        uds=None if config.uds is None else os.path.abspath(config.uds),
        needs_key=bool(config.api_key),
        idle_timeout=config.idle_timeout,
    )


async def serve_until_stopped(
    front: FrontEnd, config: ServerConfig, signals: _Signals, set_state: Callable[[State], None]
) -> None:
    """Serve until a signal, a failure or --idle-timeout, then shut down in order.

    Raises the failure."""
    failing = asyncio.create_task(front.failed.wait())
    stopping = asyncio.create_task(signals.received.wait())
    idle_timeout, timeout = config.idle_timeout or math.inf, config.shutdown_timeout
    while not (failing.done() or stopping.done()):
        if front.idle_seconds >= idle_timeout:
            logger.info("no request for %g s: the server ends (--idle-timeout)", idle_timeout)
            timeout = math.inf  # a request that slips in is not cut, however long it takes
            break
        left = min(idle_timeout - front.idle_seconds, MAX_SLEEP)
        await asyncio.wait({failing, stopping}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    if not failing.done():
        set_state("stopping")
        _notify_systemd("STOPPING=1")
        draining = asyncio.create_task(front.drain())
        hurrying = asyncio.create_task(signals.received_again.wait())
        countdown = asyncio.create_task(_log_countdown(front, timeout))
        await asyncio.wait(
            {failing, draining, hurrying},
            timeout=None if math.isinf(timeout) else timeout,
            return_when=asyncio.FIRST_COMPLETED,
        )
        countdown.cancel()
    await front.shut_down(
        "The server is shutting down, and the time for running requests to finish is over."
    )
    if front.failure is not None:
        raise front.failure


async def _log_countdown(front: FrontEnd, timeout: float) -> None:
    """Log open requests and seconds left: every second on a terminal, else every ten."""
    if math.isinf(timeout):
        return
    deadline = time.monotonic() + timeout
    interval = 1.0 if sys.stderr.isatty() else 10.0
    while True:
        if num_active := front.num_active:
            logger.info(
                "shutting down: %d open %s %d s to finish; another signal ends them at once",
                num_active,
                "request has" if num_active == 1 else "requests have",
                max(0, math.ceil(deadline - time.monotonic())),
            )
        else:
            logger.info("shutting down")
        await asyncio.sleep(interval)


def _notify_systemd(state: str) -> None:
    """Send a state to the socket that systemd names, if any (sd_notify(3))."""
    path = os.environ.get("NOTIFY_SOCKET")
    if path:
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender,
        ):
            sender.connect("\0" + path[1:] if path.startswith("@") else path)
            sender.send(state.encode())


class _Signals:
    """SIGTERM and Ctrl-C."""

    def __init__(self) -> None:
        self.received = asyncio.Event()
        self.received_again = asyncio.Event()
        self.first: signal.Signals | None = None
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._handle, number)

    def _handle(self, number: signal.Signals) -> None:
        self.first = self.first or number
        (self.received_again if self.received.is_set() else self.received).set()

    async def wait_for(self, task: asyncio.Task[Any]) -> bool:
        """Wait for a task. Returns False if a signal comes first; raises the task's exception."""
        waiting = asyncio.create_task(self.received.wait())
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if task.done():
            task.result()
            return True
        return False


def _report(phase: str, seconds: float) -> None:
    if writes_json():
        fields = {"phase": phase, "seconds": round(seconds, 3)}
        logger.info("%s took %.2f s", phase, seconds, extra={"fields": fields})
    else:  # one write: the core logs to the same terminal
        sys.stderr.write(f"  {phase:<12}{seconds:7.2f} s\n")
