"""A small OpenAI chat server in a thread of its own, and a terminal that remembers."""

from __future__ import annotations

import asyncio
import io
import threading
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web

from toolkit.chat.client import ChatClient
from toolkit.chat.terminal import Terminal
from toolkit.config.clients import ChatConfig


@dataclass
class FakeServer:
    """Answers each question with `pieces`; stops in the middle of them, without an end, when told to."""

    url: str = ""
    pieces: list[str] = field(default_factory=lambda: ["Hello", ", ", "wörld", "."])
    api_key: str | None = None
    stall_after: int | None = None  # pieces, after which nothing comes any more
    break_after: int | None = None  # pieces, after which the connection closes
    bodies: list[dict] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def refusal(self, request: web.Request) -> web.Response | None:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "Invalid API key."}}, status=401)
        return None

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return self.refusal(request) or web.json_response({"data": [{"id": "fake"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if body["model"] != "fake":
            return web.json_response({"error": {"message": f"No model {body['model']}."}}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, piece in enumerate(self.pieces):
            if number == self.stall_after:
                await self.stall()
            if number == self.break_after:
                request.transport.abort()
                return response
            data = (
                b"data: " + orjson.dumps({"choices": [{"delta": {"content": piece}, "index": 0}]}) + b"\n\n"
            )
            await response.write(data[:20])  # events do not come as they were sent
            await response.write(data[20:])
        end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 42}}
        for event in (end, usage):
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


@pytest.fixture
def server():
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes(
        [
            web.get("/health", fake.health),
            web.get("/v1/models", fake.models),
            web.post("/v1/chat/completions", fake.chat),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    loop.run_until_complete(start())
    fake.url = "http://{}:{}".format(*runner.addresses[0][:2])
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Screen:
    """A terminal whose two streams can be read back."""

    def __init__(self) -> None:
        self.out, self.err = io.StringIO(), io.StringIO()
        self.terminal = Terminal(self.out, self.err)

    @property
    def answers(self) -> str:
        return self.out.getvalue()

    @property
    def talk(self) -> str:
        return self.err.getvalue()


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def connect(server):
    """A function from settings to a client of the fake server."""
    clients = []

    def make(api_key: str | None = None, model: str = "fake", **settings) -> ChatClient:
        client = ChatClient(server.url, ChatConfig(**settings), api_key=api_key, model=model)
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()
