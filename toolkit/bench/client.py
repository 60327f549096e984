"""Sends one request and takes its times. Bytes are timed when they are read, before they are parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson

from toolkit.bench.dataset import BenchRequest
from toolkit.bench.record import RequestRecord
from toolkit.bench.wire import DONE, EventBuffer, ServerError, error_message

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


def open_session(api_key: str | None) -> aiohttp.ClientSession:
    """A session without limits on connections or time: what is slow is the server's to show."""
    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    return aiohttp.ClientSession(
        # Common servers close a connection after 5 idle seconds; ours goes before, so none closes in use.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=30.0),
        headers=headers,
    )


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    """The first model that the server lists. Raises ServerError when there is no server or it lists none."""
    try:
        async with session.get(f"{url}/v1/models", timeout=aiohttp.ClientTimeout(total=30)) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise ServerError(
            f"No server answers at {url} ({_cause(error)[1]}). "
            "Start one with 'tk serve', or name another with --url."
        ) from None
    if response.status != 200:
        raise ServerError(f"{url}/v1/models answered HTTP {response.status}: {error_message(body)}")
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model; name one with --model.") from None


class Client:
    """Sends requests to one route and counts, as it goes, what the live display shows."""

    def __init__(self, session: aiohttp.ClientSession, url: str, *, clock: Callable[[], float]) -> None:
        self.session = session
        self.url = url
        self.clock = clock
        self.num_sent = 0
        self.num_done = 0
        self.num_failed = 0
        self.num_pieces = 0

    @property
    def num_running(self) -> int:
        return self.num_sent - self.num_done - self.num_failed

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Sends it now and fills the record. What goes wrong is the record's error, not an exception."""
        record.max_tokens = request.max_tokens
        self.num_sent += 1
        record.sent = self.clock()
        try:
            async with self.session.post(self.url, data=request.body) as response:
                if response.status == 200:
                    await self._read(response.content, record)
                else:
                    text = error_message(await response.read())
                    record.error = (f"HTTP {response.status}", text)
        except (aiohttp.ClientError, TimeoutError, OSError, _BrokenAnswerError) as error:
            record.error = _cause(error)
        except asyncio.CancelledError:
            self.num_sent -= 1
            raise
        record.ended = self.clock()
        if record.error is None:
            self.num_done += 1
        else:
            self.num_failed += 1

    async def _read(self, content: aiohttp.StreamReader, record: RequestRecord) -> None:
        events = EventBuffer()
        answer = _Answer(record)
        async for data in content.iter_any():
            now = self.clock()
            for event in events.feed(data):
                answer.take(event, now)
            self.num_pieces += 1
        answer.finish()


class _BrokenAnswerError(Exception):
    """(cause, example) of an answer that began well and ended badly."""


class _Answer:
    """One stream's events, as they arrive, into its record."""

    def __init__(self, record: RequestRecord) -> None:
        self.record = record
        self.counted = 0  # tokens in the pieces so far, where pieces say; else pieces
        self.total: int | None = None  # tokens by the server's own count
        self.running_usage = False  # whether every piece comes with that count
        self.complete = False

    def take(self, data: bytes, now: float) -> None:
        if data == DONE:
            self.complete = True
            return
        try:
            event: dict[str, Any] = orjson.loads(data)
            usage = event.get("usage")
            choices = event.get("choices")
            if usage:
                self.total = usage["completion_tokens"]
                self.record.prompt_tokens = usage["prompt_tokens"]
            if choices:
                self._piece(choices[0], now, counted=bool(usage))
            elif "error" in event:
                raise _BrokenAnswerError("error in the stream", error_message(data))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            raise _BrokenAnswerError("unreadable event", data.decode(errors="replace")[:200]) from None

    def _piece(self, choice: dict[str, Any], now: float, *, counted: bool) -> None:
        """One piece of the answer, of as many tokens as its token_ids or its running usage say, else 1."""
        record = self.record
        if choice.get("finish_reason"):
            self.complete = True
        ids = choice.get("token_ids")
        if record.last_token is None and counted:
            self.running_usage = True
        if ids is not None:
            carried = len(ids)
        elif self.running_usage and self.total is not None:
            carried = self.total - self.counted
        else:
            carried = 1 if choice.get("text") or any(_said(choice.get("delta") or {})) else 0
            record.gaps_per_token &= carried == 0
        if carried <= 0:
            return
        self.counted += carried
        if record.last_token is None:
            record.first_token = now
        else:
            record.gaps.extend([(now - record.last_token) / carried] * carried)
        record.last_token = now

    def finish(self) -> None:
        if not self.complete:
            raise _BrokenAnswerError("answer broken off", f"after {self.counted} tokens, without an end")
        self.record.output_tokens = self.counted if self.total is None else self.total
        if self.counted == self.total:
            self.record.gaps_per_token = True  # every piece was one token after all


def _said(delta: dict[str, Any]) -> list[Any]:
    return [delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")]


def _cause(error: BaseException) -> tuple[str, str]:
    """(what kind of failure, this one in words)."""
    match error:
        case _BrokenAnswerError():
            return error.args[0], error.args[1]
        case aiohttp.ClientConnectorError():
            return "cannot connect", error.os_error.strerror or str(error.os_error)
        case TimeoutError():
            return "timeout", str(error) or "no connection in time"
        case aiohttp.ServerDisconnectedError() | ConnectionResetError():
            return "connection closed by the server", str(error)
        case aiohttp.ClientPayloadError():
            return "answer broken off", str(error)
    return type(error).__name__, str(error)


def clock_from_now() -> Callable[[], float]:
    """A monotonic clock that reads 0 s now."""
    start, now = time.perf_counter(), time.perf_counter
    return lambda: now() - start
