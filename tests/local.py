"""`tk serve` in threads of this process: the same front end and engine core, ready in 0.3 s.

A process spends three seconds importing. `server.Server` is for tests of processes, signals, logs,
memory and load."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import uvloop
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from tests.server import KEEP_ALIVE, START_TIMEOUT, WAIT, Server, command
from toolkit.api.http.connections.listener import listen
from toolkit.cli import main
from toolkit.config import EngineConfig, ServerConfig
from toolkit.engine.cores import core_client
from toolkit.engine.cores.core_process import CoreProcess
from toolkit.logs import LogStyle
from toolkit.metrics import shared
from toolkit.serving import lifecycle
from toolkit.serving.checks import check_server_settings
from toolkit.serving.front import ModelSetup, SingleProcess
from toolkit.serving.ready_card import print_ready_card
from toolkit.serving.stats_log import set_info_metrics
from toolkit.worker.worker import Worker

METRICS_INTERVAL, STEP = 0.01, 0.1  # seconds, as in `inside.sitecustomize`


class CoreThread:
    """Runs an engine core in a thread. Stands in for the `Popen` of its process."""

    pid = os.getpid()
    stdin = None

    def __init__(self, command: Sequence[str], **_: object) -> None:
        self._thread = threading.Thread(target=CoreProcess(command[-1]).run, daemon=True)
        self._thread.start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def kill(self) -> None:
        """Do nothing: a thread ends after a Stop or an error."""

    def wait(self) -> None:
        self._thread.join(WAIT)


class LocalServer(Server):
    """A server that is ready. It has no attributes of its own processes."""

    pid = os.getpid()

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self._started, self._stopping = threading.Event(), asyncio.Event()
        self._error: BaseException | None = None
        self._log = io.StringIO()
        root = logging.getLogger()
        self._level, others = root.level, root.handlers
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("TK_")]:
                patch.delenv(name)
            for name, value in {"HOME": str(cwd), **environment}.items():
                patch.setenv(name, value)
            for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
                patch.syspath_prepend(folder)
            patch.chdir(cwd)
            patch.setattr(sys, "stderr", self._log)
            settings = parse(*arguments, "--port", "0", "--num-threads", "1")
            root.handlers = []  # for LogStyle.apply, which adds one if there is none
            stand_in = SimpleNamespace(Popen=CoreThread, PIPE=subprocess.PIPE)
            patch.setattr(core_client, "subprocess", stand_in)
            self._thread = threading.Thread(target=self._run, args=settings, daemon=True)
            self._thread.start()
            assert self._started.wait(START_TIMEOUT)
        self._interval, shared.INTERVAL = shared.INTERVAL, METRICS_INTERVAL
        self._handlers, root.handlers = root.handlers, others + root.handlers
        if self._error is not None:
            raise self._error
        self.url = re.search(r"https?://[^/]+", self.curl)[0]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, limits=KEEP_ALIVE)

    @property
    def lines(self) -> list[str]:
        """Lines of the log."""
        return self._log.getvalue().splitlines(keepends=True)

    def _samples(self, *names: str) -> list[Sample]:
        """Return samples without a request: writing all metrics takes 20 ms."""
        found = self._named(self._registry.restricted_registry(names), names)
        # Some collectors have no names.
        return found or self._named(self._registry, names)

    @staticmethod
    def _named(registry: CollectorRegistry, names: Sequence[str]) -> list[Sample]:
        return [one for each in registry.collect() for one in each.samples if one.name in names]

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Make each step take 0.1 s, so that requests are still running when a test looks."""
        execute = Worker.execute

        def slow(worker: Worker, step: object) -> object:
            time.sleep(STEP)
            return execute(worker, step)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Worker, "execute", slow)
            yield

    def children(self, module: str) -> list[psutil.Process]:
        """Return the child processes that run a module."""
        return [c for c in psutil.Process().children() if module in command(c)]

    def stop(self) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(WAIT)
        shared.INTERVAL = self._interval
        root = logging.getLogger()
        root.setLevel(self._level)
        for handler in self._handlers:
            root.removeHandler(handler)

    def _run(self, engine: EngineConfig, config: ServerConfig) -> None:
        try:
            uvloop.run(self._serve(engine, config))
        except BaseException as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self, engine: EngineConfig, config: ServerConfig) -> None:
        """Do what `lifecycle.serve` does, without its signals."""
        self._loop = asyncio.get_running_loop()
        LogStyle(config.log_level, json=config.log_format == "json").apply()
        config, names = check_server_settings(engine, config)
        with listen(config) as listener:
            front = SingleProcess([ModelSetup(engine, names)], config)
            self._registry = front.metrics.registry
            try:
                models = await front.start(listener, lambda *_: None)
                print_ready_card(models[0], listener, config, 0.0)
                set_info_metrics(front, models)
                self._started.set()
                await self._stopping.wait()
                await front.shut_down("The test is over.")
            finally:
                await front.close()


def parse(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
    """Return the settings of `tk serve` with these arguments."""
    settings: list[tuple[EngineConfig, ServerConfig]] = []

    async def serve(engine: EngineConfig, config: ServerConfig, _: float) -> int:
        settings.append((engine, config))
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lifecycle, "serve", serve)
        patch.setattr(sys, "argv", ["tk", "serve", *arguments])
        with contextlib.suppress(SystemExit):
            main()
    return settings[0]
