"""`tk serve` in a process of its own, as a user runs it."""

from __future__ import annotations

import contextlib
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
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT = 240.0
WAIT = 90.0
"""Seconds after which something that should happen at once is taken never to happen: machines are busy."""
INSIDE = Path(__file__).parent / "inside"
"""What is on the path of an engine's processes, so that tests have them in hand."""
LASTING = httpx.Limits(keepalive_expiry=None)
"""A connection stays, however long nothing is asked over it: another might lead to another API worker."""


def in_hand(folder: Path) -> dict[str, str]:
    """The environment of processes that heed the files of a folder: see `inside`."""
    path = os.pathsep.join(filter(None, [str(INSIDE), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "IN_HAND": str(folder)}


class Process:
    """`tk` with some arguments. Its output is gathered as it comes."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("TK_")}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "toolkit", *arguments],
            cwd=cwd,
            env=inherited | {"HF_HUB_OFFLINE": "1", "HOME": str(cwd)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.lines: list[str] = []
        """What it wrote to stderr."""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    @property
    def stderr(self) -> str:
        return "".join(self.lines)

    def wait(self, timeout: float = WAIT) -> int:
        """Its exit code."""
        code = self.popen.wait(timeout)
        self._reading.join(timeout)
        return code

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGKILL)
            self.popen.wait()
        self._reading.join(5.0)
        self.popen.stdout.close()

    def _read(self) -> None:
        with self.popen.stderr as stderr:
            for line in stderr:
                self.lines.append(line)


class Server(Process):
    """A server that answers. `url` is its root."""

    def __init__(
        self, *arguments: str, cwd: Path, port: int | None = 0, **environment: str
    ) -> None:
        given = [] if port is None else ["--port", str(port)]
        self._in_hand = Path(tempfile.mkdtemp(dir=cwd, prefix="in-hand-"))
        given += ["--num-threads", "1"]
        super().__init__(
            "serve", *arguments, *given, cwd=cwd, **in_hand(self._in_hand) | environment
        )
        try:
            self.url = self._await_card()
        except BaseException:
            self.stop()
            raise
        self.core, *_ = self.cores
        self.http = httpx.Client(base_url=self.url, timeout=WAIT, limits=LASTING)

    @property
    def pid(self) -> int:
        return self.popen.pid

    def children(self, module: str) -> list[psutil.Process]:
        """Its processes that run a module."""
        return [c for c in psutil.Process(self.popen.pid).children() if module in command(c)]

    @property
    def cores(self) -> list[psutil.Process]:
        """The processes of its engines."""
        return self.children("toolkit.engine.cores.core_process")

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes that answer requests for it."""
        return self.children("toolkit.serving.api_worker")

    @property
    def curl(self) -> str:
        """The line of the ready card."""
        return next(line.strip() for line in self.lines if line.startswith("curl "))

    def openai(self, key: str = "any", **options: object) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60.0, **options
        )

    def signal(self, number: int) -> None:
        self.popen.send_signal(number)

    @contextlib.contextmanager
    def slowly(self) -> Iterator[None]:
        """Each step takes a tenth of a second meanwhile, so that what runs still runs when a test comes to look."""
        with self._holding("slow"):
            yield

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Each step fails meanwhile."""
        with self._holding("broken"):
            yield

    @contextlib.contextmanager
    def holding(self, module: str) -> Iterator[None]:
        """Processes that are started to run this module do not begin meanwhile."""
        with self._holding(module):
            yield

    @contextlib.contextmanager
    def _holding(self, name: str) -> Iterator[None]:
        (self._in_hand / name).touch()
        try:
            yield
        finally:
            (self._in_hand / name).unlink()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that have these labels; 0 when there is none."""
        text = self.http.get("/metrics").text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def seconds_spent(self) -> float:
        """Of processor time, by all of its processes: unlike time, it does not pass while others have the cores."""
        processes = [psutil.Process(self.pid), *psutil.Process(self.pid).children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def is_idle(self) -> bool:
        """Whether nothing runs, nothing waits, and no block is in use."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(self.metric(f"tk:{name}") == 0.0 for name in gauges)

    def await_health(self) -> None:
        """Soon, though not at once where its engine was put aside: it is well."""
        until(lambda: self.http.get("/health").status_code == 200)

    def stop(self) -> None:
        if hasattr(self, "http"):
            self.http.close()
        super().stop()

    def _await_card(self) -> str:
        def found() -> re.Match[str] | None:
            if self.popen.poll() is not None:
                self._reading.join(WAIT)
                raise AssertionError(f"the server did not start:\n{self.stderr}")
            return re.search(
                r"^curl (?:--unix-socket \S+ )?(https?://\S+)/v1/.*\n", self.stderr, re.MULTILINE
            )

        return until(found, START_TIMEOUT)[1]


def until(condition: Callable[[], object], timeout: float = WAIT) -> object:
    """Waits for something to become true, and returns it."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{condition} did not become true in {timeout} s"
        time.sleep(0.02)
    return value


def command(process: psutil.Process) -> list[str]:
    """How a process was started; nothing when it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def gone(process: psutil.Process) -> bool:
    """Whether a process has ended; one whose parent has not looked yet has."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def free_port() -> int:
    """A port that nobody listens on, and that the system gives to nobody who asks for any."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


class Client:
    """One request for a long answer, made in a thread: how it went."""

    def __init__(
        self,
        server: Server,
        max_tokens: int,
        stream: bool = True,
        prompt: Sequence[int] = (1, 2, 3),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = 0
        self.events: list[str] = []
        """What followed each `data: `, of a stream; the body, otherwise."""
        self.broken: Exception | None = None
        """The connection ended before the answer did."""
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
        """The message of the error that ended it."""
        last = next((json.loads(e) for e in reversed(self.events) if e != "[DONE]"), {})
        return last["error"]["message"] if "error" in last else None

    @property
    def num_tokens(self) -> int | None:
        """Tokens of a complete answer."""
        if not self.events or self.broken or (self._body["stream"] and self.events[-1] != "[DONE]"):
            return None
        last = json.loads(next(e for e in reversed(self.events) if e != "[DONE]"))
        return last["usage"]["completion_tokens"] if last.get("usage") else None

    def finish(self) -> Client:
        """Waits until the answer, or the connection, has ended."""
        self._thread.join(WAIT)
        assert not self._thread.is_alive(), "the client still waits for an answer"
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


def put_under_load(server: Server, max_tokens: int, beside: int = 0) -> list[Client]:
    """A request that is not streamed and three streams, each of which has begun. `beside`: how many more run. They go on
    for longer than it takes to look only while the server runs `slowly`.
    """
    clients = [Client(server, max_tokens, stream=i > 0) for i in range(4)]
    until(lambda: all(c.events for c in clients[1:]))
    until(lambda: server.metric("tk:num_requests_running") == 4 + beside)
    return clients
