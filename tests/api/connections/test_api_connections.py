"""One client must not hurt the others: limits of connections and of what they may send or leave.

The server runs in this process, with small limits and without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest
import uvloop
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from toolkit.api.http.connections import connection
from toolkit.api.http.connections.listener import Acceptor
from toolkit.api.http.layers import limits
from toolkit.api.http.layers.limits import BodiesTooLargeError, BodyMemory
from toolkit.api.http.server import ServedModel, Server
from toolkit.api.http_server import HTTPServer
from toolkit.config import ServerConfig
from toolkit.metrics import Metrics

WAIT = 20.0
LIVEZ = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"
METRICS = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


class Streams:
    """A connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next response."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), WAIT)).lower()
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        return int(head[9:12]), await self.reader.readexactly(length)

    async def rest(self) -> bytes:
        """Return what arrives until the connection ends, in any way."""
        received = b""
        with contextlib.suppress(ConnectionError):
            while piece := await asyncio.wait_for(self.reader.read(2**16), WAIT):
                received += piece
        return received


class Local:
    """A server of this process. Its keys: "k"."""

    def __init__(self, listening: socket.socket) -> None:
        self.listening = listening
        self.healthy = asyncio.Event()
        self.num_rendered = self.num_checked = 0

        def expose() -> bytes:
            self.num_rendered += 1
            return b"#" * 2**25  # more than the system's buffers take

        async def check() -> None:
            self.num_checked += 1
            await self.healthy.wait()

        metrics = Metrics("tk", "x")
        metrics.expose = expose  # type: ignore[method-assign]
        engine = SimpleNamespace(
            metrics=metrics, check=check, num_waiting=0, num_waiting_tokens=0,
            max_num_running=1, stats=SimpleNamespace(num_running=0),
        )  # fmt: skip
        model = ServedModel(engine, ("x",))
        self.server = Server(ServerConfig(api_key=("k",)), [model])
        self.http = HTTPServer(self.server)

    async def connect(self, sent: bytes = b"") -> Streams:
        streams = Streams(*await asyncio.open_connection(*self.listening.getsockname()))
        streams.send(sent)
        return streams


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """The server's loop."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def local() -> AsyncIterator[Local]:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        made = Local(listening)
        await made.http.start(listening)
        yield made
        for one in list(made.http._pool.connections):
            one.abort()
        made.http._server.force_exit = True
        await made.http.shut_down()


# ---- requests that do not end


@pytest.mark.parametrize(
    ("limit", "value", "piece"),
    [("UNREAD_TIMEOUT", 0.1, b"1\r\nx\r\n"), ("MAX_UNREAD", 1000, b"20\r\n%s\r\n" % (b"x" * 32))],
    ids=["seconds", "bytes"],
)
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
async def test_the_rest_of_a_refused_body_is_limited(
    local: Local,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: float,
    piece: bytes,
    more: bytes,
) -> None:
    monkeypatch.setattr(connection, "UNREAD_TIMEOUT", 10 * WAIT)
    monkeypatch.setattr(connection, limit, value)
    client = await local.connect(CHUNKED.replace(b"Host", more + b"Host"))
    assert (await client.answer())[0] == 401
    async with asyncio.timeout(WAIT):
        while local.http._pool.connections:
            client.send(piece)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("size", [10, 2**22], ids=["small", "large"])
@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"], ids=["keep-alive", "close"])
async def test_a_refused_client_that_sends_all_gets_the_answer(
    local: Local, size: int, more: bytes
) -> None:
    client = await local.connect(POST + more + b"Content-Length: %d\r\n\r\n" % size)
    await asyncio.sleep(0.05)  # the response is sent meanwhile
    client.send(b"x" * size)
    await asyncio.wait_for(client.writer.drain(), WAIT)
    assert (await client.answer())[0] == 401
    if more:
        assert await client.rest() == b""
    else:
        client.send(LIVEZ)
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("route", "status"),
    [
        (b"POST /livez", 405),
        (b"POST /nope", 404),
        (b"POST /v1/models", 405),
        (b"PUT /v1/completions", 405),
    ],
)
async def test_a_request_that_takes_no_body_is_answered_early(
    local: Local, route: bytes, status: int
) -> None:
    head = CHUNKED.replace(b"POST /v1/completions", route)
    client = await local.connect(head.replace(b"Host", b"X-API-Key: k\r\nHost"))
    assert (await client.answer())[0] == status


async def test_headers_after_a_body_are_ignored(local: Local) -> None:
    """Any number may come."""
    client = await local.connect(CHUNKED + b"2\r\n{}\r\n0\r\nX-API-Key: k\r\n\r\n")
    assert (await client.answer())[0] == 401


# ---- more connections than descriptors


async def test_connections_over_the_limit_are_answered_later(
    local: Local, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Idle ones, and those that never send a request, give way."""
    monkeypatch.setattr(connection, "EVICTION_AGE", 0.02)
    local.http._pool.limit = 5
    silent = [await local.connect(sent) for sent in [b"", b"GET", CHUNKED] * 2]
    clients = [await local.connect(LIVEZ) for _ in range(20)]
    assert [(await client.answer())[0] for client in clients] == [200] * 20
    assert len([one for one in caplog.records if "are in use" in one.message]) == 1
    assert len(silent) == 6


async def test_connections_wait_while_all_others_are_busy(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "EVICTION_AGE", 0.05)
    local.http._pool.limit = 2
    busy = [await local.connect(LIVEZ.replace(b"livez", b"health")) for _ in range(2)]
    async with asyncio.timeout(WAIT):
        while local.num_checked < 2:
            await asyncio.sleep(0.01)
    late = await local.connect(LIVEZ)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(late.reader.read(1), 0.1)
    local.healthy.set()
    assert [(await client.answer())[0] for client in (*busy, late)] == [200] * 3


async def test_without_descriptors_connections_wait_and_it_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failures = [OSError(errno.EMFILE, "Too many open files")] * 5

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            if failures:
                raise failures.pop()
            return super().accept()

    taken: list[socket.socket] = []
    with Exhausted() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        acceptor = Acceptor(listening, lambda one: bool(taken.append(one)) or True)
        client.connect(listening.getsockname())
        async with asyncio.timeout(WAIT):
            while not taken:
                await asyncio.sleep(0.01)
        acceptor.close()
        taken[0].close()
    assert [one.levelno for one in caplog.records] == [logging.WARNING]
    assert "too many open files" in caplog.text.lower()
    assert "ulimit -n" in caplog.text


# ---- clients that do not read


async def test_answered_requests_leave_no_cycles(local: Local) -> None:
    """Collecting it would hold up all streams, and prompts would stay until then."""
    gc.collect()
    gc.disable()
    try:
        before = _cycles()  # of connections of other tests
        client = await local.connect()
        for _ in range(5):
            client.send(LIVEZ)
            await client.answer()
        assert len(_cycles()) <= len(before) + 1, "the last one"
    finally:
        gc.enable()


def _cycles() -> list[RequestResponseCycle]:
    return [one for one in gc.get_objects() if type(one) is RequestResponseCycle]


async def test_requests_in_line_are_limited(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_PIPELINED", 3)
    answers = (await (await local.connect(LIVEZ * 50)).rest()).split(b"HTTP/1.1 200")[1:]
    assert len(answers) == 4
    assert [b"connection: close" in one for one in answers] == [False] * 3 + [True]


async def test_a_client_that_does_not_read_gets_no_more_answers(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "WRITE_TIMEOUT", 0.3)
    client = await local.connect(METRICS * 30)
    client.writer.transport.pause_reading()
    async with asyncio.timeout(WAIT):
        while not local.num_rendered or local.http._pool.connections:
            await asyncio.sleep(0.01)
    assert local.num_rendered == 1


# ---- memory of bodies


async def arriving(memory: BodyMemory, size: int, then: asyncio.Event) -> bytes:
    """Read a body of which `size` bytes arrive now, and the end after `then`."""
    messages = [{"type": "http.request", "body": b"x" * size, "more_body": True}]

    async def receive() -> dict[str, object]:
        if messages:
            return messages.pop()
        await then.wait()
        return {"type": "http.request"}

    with memory.body() as body:
        return await body.read(receive)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> BodyMemory:
    monkeypatch.setattr(limits, "MAX_BODIES", 1000)
    monkeypatch.setattr(limits, "FREE_BODY", 100)
    return BodyMemory()


async def test_bodies_share_a_limit_and_small_ones_are_free(memory: BodyMemory) -> None:
    then = asyncio.Event()
    first = [asyncio.ensure_future(arriving(memory, 600, then)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(BodiesTooLargeError) as refused:
        await arriving(memory, 600, then)
    assert refused.value.retry_after == 1
    small = asyncio.ensure_future(arriving(memory, 100, then))
    await asyncio.sleep(0)
    then.set()
    assert [len(one) for one in await asyncio.gather(*first, small)] == [600, 600, 100]
    assert len(await arriving(memory, 1100, then)) == 1100  # all is free again


async def test_a_slow_body_gives_way_to_others(
    memory: BodyMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SLOW_BODY", 0.0)
    then, never = asyncio.Event(), asyncio.Event()
    slow = [asyncio.ensure_future(arriving(memory, 600, never)) for _ in range(2)]
    await asyncio.sleep(0)
    fast = asyncio.ensure_future(arriving(memory, 600, then))
    with pytest.raises(BodiesTooLargeError):
        await asyncio.wait_for(slow[0], WAIT)
    then.set()
    assert len(await fast) == 600
    slow[1].cancel()


async def test_drain_waits_for_answers_in_the_background(local: Local) -> None:
    answered = asyncio.Event()

    async def answer() -> None:
        await answered.wait()

    local.server.background.start(answer(), "client")
    draining = asyncio.create_task(local.http.drain())
    await asyncio.sleep(0.05)
    assert (draining.done(), local.http.num_active) == (False, 1)
    answered.set()
    await asyncio.wait_for(draining, WAIT)
