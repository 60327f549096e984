"""Connections of an API worker that dies: what their clients get, and what is released."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack

import pytest
import uvicorn
import uvloop
from starlette.types import Receive, Scope, Send

from toolkit.api.http.connections.connection import ConnectionPool
from toolkit.api.http.connections.kept_connection import KeptConnection
from toolkit.api.http.connections.last_will import NO_SLOT, SLOT_BYTES, Slot, State
from toolkit.api.http.streaming import DONE, LOST_WORKER, EventStream
from toolkit.serving import kept_connections
from toolkit.serving.kept_connections import Ended, KeptConnections

EVENT = b'data: {"text": "a"}\n\n'
BIG = b"data: " + b"x" * 2**24 + b"\n\n"
HEAD = b"GET /%s HTTP/1.%d\r\nHost: a\r\n\r\n"


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer as the path says. /stream, /big and /half do not end."""
    path = scope["path"]
    if path == "/wait":
        await asyncio.Event().wait()
    elif path in ("/stream", "/big", "/done"):

        async def events() -> AsyncIterator[bytes]:
            yield BIG if path == "/big" else EVENT
            if path != "/done":
                await asyncio.Event().wait()
            yield DONE

        await EventStream(events(), lambda: None)(scope, receive, send)
    else:
        size = b"2" if path == "/half" else b"1"
        start = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": [(b"content-length", size)]})
        await send({"type": "http.response.body", "body": b"a", "more_body": path == "/half"})
        if path == "/half":
            await asyncio.Event().wait()


class Pair:
    """The first process and a worker in one process, and their clients."""

    def __init__(self, stack: ExitStack) -> None:
        self.kept = KeptConnections(1)
        self.channel, self._taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener = socket.create_server(("127.0.0.1", 0))
        for one in (self.channel, self._taken, self._listener):
            stack.enter_context(one)
        self._stack = stack
        self._wills = mmap.mmap(self.kept.memory_file, 0)
        self._config = uvicorn.Config(app, lifespan="off", log_config=None)
        self._config.load()
        self._state = ConnectionPool(1000)
        self.slots: list[int] = []

    async def connect(self) -> socket.socket:
        client = self._stack.enter_context(socket.create_connection(self._listener.getsockname()))
        client.setblocking(False)
        self.kept.hand_over(self._listener.accept()[0], self.channel)
        index, (descriptor,), _, _ = socket.recv_fds(self._taken, 4, 1)
        self.slots.append(int.from_bytes(index, "little"))
        connection = socket.socket(fileno=descriptor)
        connection.setblocking(False)
        if self.slots[-1] == NO_SLOT:
            self._stack.enter_context(connection)
            return client
        slot = Slot(self._wills, self.slots[-1])
        options = {"config": self._config, "server_state": self._state, "app_state": {}}
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(
            lambda: KeptConnection(slot, connection, **options, _loop=loop), connection
        )
        return client


def run(test: Callable[[Pair], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        with ExitStack() as stack:
            await asyncio.wait_for(test(Pair(stack)), 30)

    uvloop.run(main())


async def read_until(client: socket.socket, end: bytes) -> bytes:
    """Read to `end`, or to the end of the connection if `end` is empty."""
    data = b""
    while not end or not data.endswith(end):
        part = await asyncio.get_running_loop().sock_recv(client, 2**20)
        if not part:
            break
        data += part
    return data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


ANSWER = b"\r\n\r\na"
OPEN = chunk(EVENT)
ERROR = LOST_WORKER.message.encode()


@pytest.mark.parametrize(
    ("requests", "before", "outcome"),
    [
        ([], b"", "idle"),
        ([HEAD % (b"plain", 1)], ANSWER, "idle"),
        ([HEAD % (b"done", 1)], b"0\r\n\r\n", "idle"),
        ([HEAD % (b"plain", 1), HEAD % (b"plain", 1)], ANSWER, "idle"),
        ([b"GET /plain HT"], None, "503"),
        ([HEAD % (b"wait", 1)], None, "503"),
        ([HEAD % (b"wait", 0)], None, "503"),
        ([b"POST /wait HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\na"], None, "503"),
        ([HEAD % (b"plain", 1) + b"GET"], ANSWER, "503"),
        ([HEAD % (b"plain", 1) + HEAD % (b"wait", 1)], ANSWER, "503"),
        ([HEAD % (b"done", 1), HEAD % (b"wait", 1)], b"0\r\n\r\n", "503"),
        ([HEAD % (b"stream", 1)], OPEN, "event"),
        ([HEAD % (b"stream", 0)], EVENT, "event"),
        ([HEAD % (b"plain", 1), HEAD % (b"stream", 1)], OPEN, "event"),
        ([HEAD % (b"stream", 1) + HEAD % (b"plain", 1)], OPEN, "event"),
        ([HEAD % (b"half", 1)], ANSWER, "cut"),
        ([HEAD % (b"big", 1)], b"xxxx", "cut"),
    ],
)
def test_client_of_a_dead_worker_gets_its_last_will(
    requests: list[bytes], before: bytes | None, outcome: str
) -> None:
    async def test(pair: Pair) -> None:
        client = await pair.connect()
        for index, request in enumerate(requests):
            client.sendall(request)
            if before is None or index < len(requests) - 1:
                await asyncio.sleep(0.02)
        sent = await read_until(client, before) if before else b""
        ended = pair.kept.end()
        assert (ended.num_warned, ended.num_cut, len(ended.idle)) == (
            outcome in ("503", "event"),
            outcome == "cut",
            outcome == "idle",
        )
        for connection in ended.idle:
            connection.close()
        if outcome == "503":
            rest = await read_until(client, b"")
            assert rest.split(ANSWER)[-1].startswith(b"HTTP/1.1 503 ")
            assert ERROR in rest
        elif outcome == "event":
            rest = await read_until(client, b"")
            assert ERROR in rest
            is_chunked = sent.endswith(OPEN)
            assert rest.endswith(DONE + (b"\r\n0\r\n\r\n" if is_chunked else b""))
            error = rest.split(b"\r\n", 1)[1].removesuffix(b"\r\n0\r\n\r\n") if is_chunked else rest
            assert not is_chunked or rest == chunk(error) + b"0\r\n\r\n"

    run(test)


async def released(kept: KeptConnections) -> None:
    while kept.num_connections:
        await asyncio.sleep(0.001)


def test_connection_that_the_worker_closes_is_released() -> None:
    async def test(pair: Pair) -> None:
        for _ in range(3):
            client = await pair.connect()
            client.sendall(HEAD % (b"done", 0))
            assert (await read_until(client, b"")).endswith(DONE)
            await released(pair.kept)
        assert pair.slots == [0, 0, 0]
        assert pair.kept.end() == Ended()

    run(test)


def test_connection_that_the_client_closes_is_released() -> None:
    async def test(pair: Pair) -> None:
        client = await pair.connect()
        client.sendall(HEAD % (b"stream", 1))
        await read_until(client, OPEN)
        client.close()
        await released(pair.kept)

    run(test)


def test_slot_is_free_once_the_worker_has_closed_it() -> None:
    """A worker that learns late of a reset would write into its successor's slot."""

    async def test(pair: Pair) -> None:
        client = await pair.connect()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # resets it
        pair.kept.release()  # before the loop reports it to the worker
        assert pair.kept.num_connections == 0
        await pair.connect()
        await asyncio.sleep(0.01)
        await pair.connect()
        assert pair.slots == [0, 1, 0]

    run(test)


def test_connections_above_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_connections, "MAX_CONNECTIONS", 2)

    async def test(pair: Pair) -> None:
        clients = [await pair.connect() for _ in range(3)]
        assert pair.slots == [0, 1, NO_SLOT]
        assert pair.kept.num_connections == 2
        clients[0].close()
        while pair.kept.num_connections == 2:
            await asyncio.sleep(0.001)
        await pair.connect()
        assert pair.slots[-1] == 0

    run(test)


def test_connections_are_not_kept_with_few_descriptors_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(pair: Pair) -> None:
        await pair.connect()
        next_free = os.dup(pair.channel.fileno())
        os.close(next_free)
        monkeypatch.setattr(pair.kept, "_max_descriptor", next_free)
        await pair.connect()
        assert pair.slots == [0, NO_SLOT]
        assert pair.kept.num_connections == 1

    run(test)


def test_connection_that_no_worker_takes_stays_with_the_caller() -> None:
    async def test(pair: Pair) -> None:
        pair.channel.close()
        with pytest.raises(OSError, match="file descriptor"):
            await pair.connect()
        assert pair.kept.num_connections == 0

    run(test)


def test_slot_refuses_a_message_that_does_not_fit() -> None:
    slot = Slot(mmap.mmap(-1, 2 * SLOT_BYTES), 0)
    assert slot.store(b"a" * 500)
    assert slot.message == b"a" * 500
    assert not slot.store(b"a" * SLOT_BYTES)
    assert slot.state == State.CUT
