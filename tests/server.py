"""`tk serve` in its own process, as a user runs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import openai
import psutil
from httpx._transports import default as transports
from httpx2._transports import default as transports_of_openai
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.forked import ForkedProcess
from tests.forked import shared as shared_fork_server

START_TIMEOUT = 240.0
WAIT = 90.0  # seconds for something that should happen at once: machines are busy
INSIDE = Path(__file__).parent / "inside"  # hooks in the engine's processes
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TK_LOG_FORMAT": "text"}
KEEP_ALIVE = httpx.Limits(keepalive_expiry=None)
"""Keeps idle connections: a new one might lead to another API worker."""

# Each client would read the system's certificates, which takes 40 ms.
for module in (transports, transports_of_openai):
    module.create_ssl_context = functools.cache(module.create_ssl_context)


def hook_environment(folder: Path) -> dict[str, str]:
    """Return the environment of processes with hooks that read `folder`; see `inside`."""
    path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "TEST_HOOKS": str(folder)}


class Process:
    """A process of `tk` with some arguments. Its stderr is collected."""

    def __init__(self, *arguments: str, cwd: Path, forked: bool = True, **environment: str) -> None:
        """`forked`: fork it, and the processes that it starts, to save the imports.

        Else Python starts them, as a user does."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TK_")}
        fork_server = shared_fork_server() if forked else None
        start = functools.partial(ForkedProcess, fork_server) if fork_server else subprocess.Popen
        self.popen = start(
            [sys.executable, "-m", "toolkit", *arguments],
            cwd=cwd,
            env=inherited
            | ENVIRONMENT
            | {"HOME": str(cwd), "XDG_RUNTIME_DIR": str(cwd)}
            | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []  # of stderr
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def children(self, module: str) -> list[psutil.Process]:
        """Return its child processes that run a module, whose name begins so."""
        found = psutil.Process(self.popen.pid).children()
        return [c for c in found if any(word.startswith(module) for word in command(c))]

    def wait(self, timeout: float = WAIT) -> int:
        """Wait for its end; return the exit code."""
        code = self.popen.wait(timeout)
        self._reader.join(timeout)
        return code

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
        self._reader.join(5.0)
        self.popen.stdout.close()

    def _read(self) -> None:
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line)


class Server(Process):
    """A server that is ready. `url` is its root."""

    def __init__(
        self,
        *arguments: str,
        cwd: Path,
        port: int | None = 0,
        forked: bool = True,
        **environment: str,
    ) -> None:
        given = [] if port is None else ["--port", str(port)]
        self._hooks = Path(tempfile.mkdtemp(dir=cwd, prefix="hooks-"))
        given += ["--num-threads", "1"]
        environment = hook_environment(self._hooks) | environment
        super().__init__("serve", *arguments, *given, cwd=cwd, forked=forked, **environment)
        try:
            self.url = self._await_ready()
        except BaseException:
            self.stop()
            raise
        self.core, *_ = self.cores
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, limits=KEEP_ALIVE)

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def cores(self) -> list[psutil.Process]:
        """Processes of its engine cores."""
        return self.children("toolkit.engine.cores.core_process")

    @property
    def workers(self) -> list[psutil.Process]:
        """Processes of its API workers."""
        return self.children("toolkit.serving.api_worker")

    @property
    def curl(self) -> str:
        """Line of the start-up message."""
        return next(line.strip() for line in map(_curl_in, self.lines) if line is not None)

    def openai(self, key: str = "any", **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60.0, **options
        )

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Make each step take 0.1 s, so that requests are still running when a test looks."""
        with self._hook("slow"):
            yield

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Make each step fail."""
        with self._hook("broken"):
            yield

    @contextlib.contextmanager
    def holding(self, module: str) -> Iterator[None]:
        """Delay the start of processes that run this module."""
        with self._hook(module):
            yield

    @contextlib.contextmanager
    def _hook(self, name: str) -> Iterator[None]:
        (self._hooks / name).touch()
        try:
            yield
        finally:
            (self._hooks / name).unlink()

    def metric(self, name: str, **labels: str) -> float:
        """Add up a metric's samples with these labels; 0 without any."""
        return sum(
            sample.value
            for sample in self._samples(name)
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def _samples(self, *prefixes: str) -> list[Sample]:
        """Return the samples whose names start with one of `prefixes`.

        Only their lines are parsed: all lines would take a tenth of a second."""
        lines = self.http.get("/metrics").text.splitlines(keepends=True)
        text = "".join(line for line in lines if line.startswith(prefixes))
        return [one for family in text_string_to_metric_families(text) for one in family.samples]

    def cpu_seconds(self) -> float:
        """Return the CPU time of its processes, which does not depend on other load."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def is_idle(self) -> bool:
        """Return True if no request runs or waits and no block is in use."""
        gauges = ("tk:num_requests_running", "tk:num_requests_waiting", "tk:kv_cache_usage_perc")
        return all(sample.value == 0.0 for sample in self._samples(*gauges))

    def await_health(self) -> None:
        """Wait until it is healthy, also after a restart of its engine."""
        until(lambda: self.http.get("/health").status_code == 200)

    def stop(self) -> None:
        if hasattr(self, "http"):
            self.http.close()
        super().stop()

    def _await_ready(self) -> str:
        def found() -> re.Match[str] | None:
            if self.popen.poll() is not None:
                self._reader.join(WAIT)
                raise AssertionError(f"the server did not start:\n{self.stderr}")
            curl = "\n".join(filter(None, map(_curl_in, self.lines)))
            return re.search(r"^curl (?:--unix-socket \S+ )?(https?://\S+)/v1/.*\n", curl)

        return until(found, START_TIMEOUT)[1]


def _curl_in(line: str) -> str | None:
    """Return the command in a line of a log, in text or JSON."""
    if line.startswith('{"time"') and '"curl"' in line:
        return f"{json.loads(line)['curl']}\n"
    return line if line.startswith("curl ") else None


_running: dict[str, Server] = {}


def shared(name: str, start: Callable[[], Server]) -> Iterator[Server]:
    """Yield the running server of that name. The fixture that starts it ends it, healthy.

    To pytest, a fixture that several folders import is several fixtures."""
    if name in _running:
        yield _running[name]
        return
    _running[name] = start()
    yield _running[name]
    served = _running.pop(name)
    served.await_health()
    served.stop()


def until(condition: Callable[[], object], timeout: float = WAIT) -> object:
    """Wait until the condition is true; return its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} is not true after {timeout} s"
        time.sleep(0.02)
    return value


def command(process: psutil.Process) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        words = process.cmdline()
    except psutil.NoSuchProcess:
        return []
    while words and not words[-1]:  # in a forked process, the rest of a long line is empty
        words.pop()
    return words


def gone(process: psutil.Process) -> bool:
    """Return True if a process has ended; a zombie has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    """Return an unused port below the range that the system assigns from."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class Client:
    """One request for a long answer, sent from a thread."""

    def __init__(
        self,
        server: Server,
        max_tokens: int,
        stream: bool = True,
        prompt: Sequence[int] = (1, 2, 3),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = 0
        self.events: list[str] = []  # data of a stream's events, or lines of the body
        self.broken: Exception | None = None  # error that ended the connection too early
        self._url, self._headers = server.url, headers
        self._body = {
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": stream,
        }
        if stream:
            self._body["stream_options"] = {"include_usage": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def error(self) -> str | None:
        """Message of the error event that ended it."""
        last = next((json.loads(e) for e in reversed(self.events) if e != "[DONE]"), {})
        return last["error"]["message"] if "error" in last else None

    @property
    def num_tokens(self) -> int | None:
        """Tokens of a complete answer; None if it is not complete."""
        if not self.events or self.broken or (self._body["stream"] and self.events[-1] != "[DONE]"):
            return None
        last = json.loads(next(e for e in reversed(self.events) if e != "[DONE]"))
        return last["usage"]["completion_tokens"] if last.get("usage") else None

    def finish(self) -> Client:
        """Wait until the answer or the connection has ended."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the client is still waiting for an answer"
        return self

    def _run(self) -> None:
        try:
            with (
                httpx.Client(base_url=self._url, timeout=WAIT, headers=self._headers) as http,
                http.stream("POST", "/v1/completions", json=self._body) as answer,
            ):
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line:
                        self.events.append(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            self.broken = error


def put_under_load(server: Server, max_tokens: int, num_others: int = 0) -> list[Client]:
    """Start one request without streaming and three streams, and wait for the streams' first token.

    `num_others`: requests that already run. Run this inside `slowly`: else they finish too early.
    """
    clients = [Client(server, max_tokens, stream=i > 0) for i in range(4)]
    until(lambda: all(c.events for c in clients[1:]))
    until(lambda: server.metric("tk:num_requests_running") == 4 + num_others)
    return clients
