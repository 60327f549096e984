"""Attacks by clients without a key, or with one: streams of others go on, and probes are answered.

The server has few file descriptors, and two API workers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.server import WAIT, Server

NUM_FILES = 80
NUM_CLIENTS = 100
SECONDS = 0.4  # of an attack
MAX_SILENCE = 2.0  # seconds; one is the aim, but other tests share the cores
PATH = "/v1/completions"
KEY = {"Authorization": "Bearer k"}
STREAM = {"prompt": [1], "max_tokens": 8000, "ignore_eos": True, "stream": True}
GET = "GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def poor(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose processes may open NUM_FILES files."""
    started = Server(
        str(bare_model),
        *("--api-workers", "2", "--api-key", "k", "--disable-log-requests"),
        cwd=tmp_path_factory.mktemp("poor"),
        TEST_NUM_FILES=str(NUM_FILES),
        TEST_METRICS_INTERVAL="0.2",  # as without the hook: readers are attackers
    )
    yield started
    started.stop()


class Silence:
    """The longest time between two pieces of a stream."""

    seconds = 0.0

    def __init__(self) -> None:
        self._last = time.monotonic()

    def end(self) -> None:
        """Note that something has arrived, or that the listener ends."""
        now = time.monotonic()
        self.seconds, self._last = max(self.seconds, now - self._last), now


@contextlib.asynccontextmanager
async def listening(server: Server) -> AsyncIterator[Silence]:
    """Read streams of completions within the block, and measure the longest silence."""
    started = asyncio.Event()
    silence = Silence()

    async def listen() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=WAIT, headers=KEY) as http:
            while True:
                async with http.stream("POST", PATH, json=STREAM) as answer:
                    assert answer.status_code == 200
                    async for _ in answer.aiter_raw():
                        if not started.is_set():
                            silence.__init__()
                            started.set()
                        silence.end()

    task = asyncio.ensure_future(listen())
    await asyncio.wait({task, asyncio.ensure_future(started.wait())}, return_when="FIRST_COMPLETED")
    yield silence
    silence.end()
    assert not task.done(), task.exception()
    task.cancel()


ATTACKS = {
    "heads that do not end": ("GET /livez HTTP/1.1\r\n", "X: y\r\n"),
    "refused bodies that do not end": (POST + "Transfer-Encoding: chunked\r\n\r\n", "1\r\nx\r\n"),
    "bodies with a key": (f"{POST}X-API-Key: k\r\nContent-Length: 9999999\r\n\r\n", "x" * 9999),
    "metrics that are not read": (GET.format("/metrics") * 100, ""),
    "scripts that are not read": (GET.format("/docs-files/swagger-ui-bundle.js") * 100, ""),
    "requests that are refused": (GET.format("/v1/models") * 100, GET.format("/v1/models")),
}


@pytest.mark.parametrize(("first", "again"), ATTACKS.values(), ids=ATTACKS)
async def test_an_attack_silences_no_stream_and_no_probe(
    poor: Server, first: str, again: str
) -> None:
    url = urlsplit(poor.url)
    attackers: list[asyncio.StreamWriter] = []

    async def attack() -> None:
        _, writer = await asyncio.open_connection(url.hostname, url.port, limit=2**10)
        attackers.append(writer)
        writer.write(first.encode())

    async def probe() -> int:
        async with httpx.AsyncClient(base_url=poor.url, timeout=WAIT) as http:
            return (await http.get("/livez")).status_code

    async with listening(poor) as silence:
        await asyncio.gather(*(attack() for _ in range(NUM_CLIENTS)))
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            for writer in attackers:
                if not writer.is_closing():
                    writer.write(again.encode())
            assert await probe() == 200
            await asyncio.sleep(0.05)
    for writer in attackers:
        writer.transport.abort()
    assert silence.seconds < MAX_SILENCE
    assert "Traceback" not in poor.stderr


async def test_clients_over_the_limit_are_all_answered(poor: Server) -> None:
    """Their connections stay open after the response."""
    url = urlsplit(poor.url)
    clients = []
    for _ in range(NUM_CLIENTS):  # those that send nothing for long would give way
        clients.append(await asyncio.open_connection(url.hostname, url.port))
        clients[-1][1].write(GET.format("/livez").encode())
    async with asyncio.timeout(WAIT):
        answers = [await reader.read(12) for reader, _ in clients]
    assert answers == [b"HTTP/1.1 200"] * NUM_CLIENTS
    for _, writer in clients:
        writer.close()


def test_few_descriptors_are_warned_about_once(poor: Server) -> None:
    few = [line for line in poor.lines if f"may open only {NUM_FILES} files" in line]
    full = [line for line in poor.lines if "connections are in use" in line]
    assert len(few) == 1
    assert 1 <= len(full) <= 2  # one per worker
    assert "ulimit -n" in few[0]
