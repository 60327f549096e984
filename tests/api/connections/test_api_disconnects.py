"""Clients that disconnect, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from urllib.parse import urlsplit

import httpx
import pytest

from tests.api.conftest import Reference
from tests.combinations import pairwise
from tests.server import WAIT, Server, until

ENDLESS = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
"""A request that runs for a quarter of an hour on a server that runs `slowly`."""
SERVERS = ["server", "two_workers"]


@pytest.fixture(params=SERVERS)
def either(request: pytest.FixtureRequest) -> Server:
    """The shared server, and one like it with two API workers."""
    return request.getfixturevalue(request.param)


def num_running(server: Server) -> float:
    return server.metric("tk:num_requests_running")


def send(server: Server, path: str, body: dict[str, object], **options: object) -> socket.socket:
    """Send a request on a bare socket. Nothing reads the response or closes it in order."""
    address = urlsplit(server.url)
    connection = socket.socket()
    for option, value in options.items():
        connection.setsockopt(socket.SOL_SOCKET, getattr(socket, option), value)
    connection.connect((address.hostname, address.port))
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\n\r\n"
    )
    connection.sendall(head.encode() + content)
    return connection


@pytest.mark.parametrize(
    ("either", "stream", "what"),
    pairwise(SERVERS, [True, False], ["one", "several prompts", "several answers", "chat"]),
    indirect=["either"],
)
def test_a_disconnect_ends_the_request(either: Server, stream: bool, what: str) -> None:
    body = ENDLESS | {"stream": stream}
    path, running = "/v1/completions", 1
    ended = 3 if what == "several prompts" else 1  # the answers to a prompt count as one request
    if what == "several prompts":
        body, running = body | {"prompt": ["one", "two", "three"]}, 3
    elif what == "several answers":
        body, running = body | {"n": 3}, 3
    elif what == "chat":
        del body["prompt"]
        body, path = (
            body | {"messages": [{"role": "user", "content": "Go on."}]},
            "/v1/chat/completions",
        )

    def aborted() -> float:
        return either.metric("tk:request_success_total", finished_reason="abort")

    before = until(lambda: (counted := aborted()) == aborted() and [counted])[0]
    with either.slowly():
        with send(either, path, body):
            until(lambda: num_running(either) == running)
            assert either.metric("tk:kv_cache_usage_perc") > 0
        until(either.is_idle)
    until(lambda: aborted() == before + ended)


def test_closing_openai_s_stream_ends_the_request(either: Server) -> None:
    with either.openai() as client, either.slowly():
        stream = client.completions.create(
            model="tiny", prompt="x", max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        for _, chunk in zip(range(3), stream, strict=False):
            assert chunk.choices
        until(lambda: num_running(either) == 1)
        stream.close()
        until(either.is_idle)


def test_an_early_disconnect_leaves_no_request(either: Server) -> None:
    with either.slowly():
        for _ in range(20):
            send(either, "/v1/completions", ENDLESS | {"stream": True}).close()
        assert either.http.get("/health").status_code == 200
        until(either.is_idle)


def test_a_client_that_does_not_read_delays_no_other(either: Server, reference: Reference) -> None:
    """Its socket's buffers fill. Others get their tokens, and its disconnect ends the request."""
    body = ENDLESS | {"stream": True, "logprobs": 20}
    with either.slowly():
        slow = [send(either, "/v1/completions", body, SO_RCVBUF=4096) for _ in range(2)]
        until(lambda: num_running(either) == 2)
    for prompt in ("a", "b", "c"):
        answer = either.http.post(
            "/v1/completions",
            json={"prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True},
        )
        assert answer.json()["choices"][0]["text"] == reference.text(prompt, 24)
    for connection in slow:
        connection.close()
    until(either.is_idle)


async def test_an_unfinished_body_delays_no_other_client(either: Server) -> None:
    address = urlsplit(either.url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: 99\r\n\r\n{"
    )
    await writer.drain()
    async with httpx.AsyncClient(base_url=either.url, timeout=WAIT) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})
    assert answer.status_code == 200
    writer.close()
    assert (await asyncio.to_thread(either.http.get, "/health")).status_code == 200
    del reader
