"""A scripted OpenAI chat server, in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

USAGE = {"prompt_tokens": 5, "completion_tokens": 42, "prompt_tokens_details": {"cached_tokens": 3}}


@dataclass
class FakeServer:
    """Answers each question with `pieces`: texts, deltas, seconds to sleep, events to wait for."""

    url: str = ""
    pieces: list[Any] = field(default_factory=lambda: ["Hello", ", ", "wörld", "."])
    models: list[dict] = field(default_factory=lambda: [{"id": "fake", "max_model_len": 100}])
    api_key: str | None = None
    finish_reason: str = "stop"
    stall_after: int | None = None  # pieces; then it sends nothing more
    break_after: int | None = None  # pieces; then it closes the connection
    fail_after: int | None = None  # pieces; then it sends an error event
    error: str = "The engine died."
    refuse_images: bool = True
    bodies: list[dict] = field(default_factory=list)
    stalled: threading.Event = field(default_factory=threading.Event)
    disconnected: threading.Event = field(default_factory=threading.Event)

    def refusal(self, request: web.Request) -> web.Response | None:
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": {"message": "Invalid API key."}}, status=401)
        return None

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def list_models(self, request: web.Request) -> web.Response:
        return self.refusal(request) or web.json_response({"data": self.models})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        if refusal := self.refusal(request):
            return refusal
        body = await request.json()
        self.bodies.append(body)
        if body["model"] not in [model["id"] for model in self.models]:
            return web.json_response(
                {"error": {"message": f"No model {body['model']}."}}, status=404
            )
        if self.refuse_images and b"image_url" in orjson.dumps(body):
            return web.json_response({"error": {"message": "Only text."}}, status=400)
        if not body["stream"]:
            message = {
                "role": "assistant",
                "content": "".join(p for p in self.pieces if isinstance(p, str)),
            }
            choice = {"message": message, "finish_reason": self.finish_reason}
            return web.json_response({"choices": [choice], "usage": USAGE})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for number, piece in enumerate(self.pieces):
            if number == self.stall_after:
                await self.stall()
            if number == self.break_after:
                request.transport.abort()
                return response
            if number == self.fail_after:
                await self.send(response, {"error": {"message": self.error}})
                return response
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            if isinstance(piece, threading.Event):
                while not piece.is_set():
                    await asyncio.sleep(0.01)
                continue
            delta = {"content": piece} if isinstance(piece, str) else piece
            await self.send(response, {"choices": [{"delta": delta, "index": 0}]})
        await self.send(response, {"choices": [{"delta": {}, "finish_reason": self.finish_reason}]})
        await self.send(response, {"choices": [], "usage": USAGE})
        await response.write(b"data: [DONE]\n\n")
        return response

    async def send(self, response: web.StreamResponse, event: dict) -> None:
        data = b"data: " + orjson.dumps(event) + b"\n\n"
        await response.write(data[:20])  # split the event
        await response.write(data[20:])

    async def stall(self) -> None:
        self.stalled.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            self.disconnected.set()
            raise


@contextmanager
def running(fake: FakeServer, port: int = 0) -> Iterator[FakeServer]:
    """Run the server on a port of 127.0.0.1."""
    loop = asyncio.new_event_loop()
    app = web.Application(client_max_size=1 << 26)
    app.add_routes(
        [
            web.get("/health", fake.health),
            web.get("/v1/models", fake.list_models),
            web.post("/v1/chat/completions", fake.chat),
        ]
    )
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()

    loop.run_until_complete(start())
    fake.url = "http://{}:{}".format(*runner.addresses[0][:2])
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def messages_of(body: dict) -> list[tuple[str, Any]]:
    """Return (role, content) of each message of a request."""
    return [(message["role"], message["content"]) for message in body["messages"]]
