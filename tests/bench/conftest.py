"""A small OpenAI-compatible server with known delays."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass, field

import orjson
import pytest
from aiohttp import web


@dataclass
class FakeServer:
    """Answers with `max_tokens` tokens, `tokens_per_chunk` at a time, after `delay` seconds."""

    url: str = ""
    runner: web.AppRunner | None = None
    delay: float = 0.0  # seconds to the first chunk
    gap: float = 0.0  # seconds between chunks
    hold: int = 0  # requests that must have arrived before any is answered
    tokens_per_chunk: int = 1
    running_usage: bool = False
    final_usage: bool = True
    refuse_every: int = 0  # every n-th request gets status 503
    truncate_every: int = 0  # every n-th answer ends in the middle
    bodies: list[dict] = field(default_factory=list)
    headers: list[dict] = field(default_factory=list)
    metrics_pages: list[str] = field(default_factory=list)  # successive answers of /metrics
    arrived: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def wait_for_requests(self, count: int) -> None:
        """Wait until `count` requests have arrived."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.bodies) >= count)

    async def metrics(self, request: web.Request) -> web.Response:
        if not self.metrics_pages:
            return web.Response(status=404)
        return web.Response(text=self.metrics_pages.pop(0))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        number = len(self.bodies)
        async with self.arrived:
            self.arrived.notify_all()
        if self.refuse_every and number % self.refuse_every == 0:
            return web.json_response({"error": {"message": "The queue is full."}}, status=503)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self.wait_for_requests(self.hold)
        await asyncio.sleep(self.delay)
        usage = {"prompt_tokens": len(body.get("prompt", "1234567")), "completion_tokens": 0}
        for start in range(0, body["max_tokens"], self.tokens_per_chunk):
            if start:
                await asyncio.sleep(self.gap)
            num_tokens = min(self.tokens_per_chunk, body["max_tokens"] - start)
            usage["completion_tokens"] += num_tokens
            text = "word " * num_tokens
            choice = (
                {"index": 0, "delta": {"content": text}}
                if "messages" in body
                else {"index": 0, "text": text}
            )
            event = {"choices": [choice]} | ({"usage": usage} if self.running_usage else {})
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            if self.truncate_every and number % self.truncate_every == 0:
                return response
        if self.final_usage:
            await response.write(
                b"data: " + orjson.dumps({"choices": [], "usage": usage}) + b"\n\n"
            )
        await response.write(b"data: [DONE]\n\n")
        return response

    async def listen(self, port: int = 0) -> None:
        """Listen on another port, or on any free one for 0."""
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()


@contextlib.asynccontextmanager
async def running():
    """Run the server on a free port."""
    fake = FakeServer()
    app = web.Application()
    app.add_routes(
        [
            web.get("/v1/models", fake.models),
            web.get("/metrics", fake.metrics),
            web.post("/v1/completions", fake.generate),
            web.post("/v1/chat/completions", fake.generate),
        ]
    )
    fake.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await fake.runner.setup()
    await fake.listen()
    host, port = fake.runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await fake.runner.cleanup()


@pytest.fixture
async def server(frozen_heap):
    async with running() as fake:
        yield fake


@pytest.fixture
def server_in_thread(frozen_heap):
    """The server in a thread with a loop of its own, for commands that run in this one."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def call(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    context = running()
    yield call(context.__aenter__())
    call(context.__aexit__(None, None, None))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def tk(tk_here):
    """Function that runs `tk bench` and returns (exit code, stdout, stderr)."""

    def run(*flags):
        done = tk_here("bench", *flags)
        return done.returncode, done.stdout, done.stderr

    return run
