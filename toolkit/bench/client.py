"""Sends one request and takes its times. Bytes are timed when they are read, before they are parsed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import orjson

from toolkit.bench.dataset import BenchRequest
from toolkit.bench.http import Http
from toolkit.bench.record import RequestRecord
from toolkit.bench.wire import DONE, EventBuffer, RequestFailedError, ServerError, error_message

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
TEXT_KEYS = (b'"text":', b'"text": ', b'"content":', b'"content": ')
QUOTE, BACKSLASH = b'"', ord("\\")


class Clock:
    """Seconds after a moment of `time.perf_counter`, which all processes of a machine share."""

    def __init__(self, start: float | None = None) -> None:
        self.start = time.perf_counter() if start is None else start

    def __call__(self) -> float:
        return time.perf_counter() - self.start


class Counts(msgspec.Struct, tag="counts"):
    """What the live display shows. A piece is one event with a part of an answer."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    pieces: int = 0

    @property
    def running(self) -> int:
        return self.sent - self.done - self.failed


async def first_model(http: Http, url: str) -> str:
    """The first model that the server lists. Raises ServerError when there is no server or it lists none."""
    try:
        status, body = await http.get("/v1/models", timeout=30.0)
    except RequestFailedError as error:
        raise ServerError(
            f"No server answers at {url} ({error.example}). "
            "Start one with 'tk serve', or name another with --url."
        ) from None
    if status != 200:
        raise ServerError(f"{url}/v1/models answered HTTP {status}: {error_message(body)}")
    try:
        return str(orjson.loads(body)["data"][0]["id"])
    except (orjson.JSONDecodeError, LookupError, TypeError):
        raise ServerError(f"{url}/v1/models lists no model; name one with --model.") from None


class Client:
    """Sends requests to one route and counts them."""

    def __init__(self, http: Http, route: str, clock: Clock) -> None:
        self.http = http
        self.route = route
        self.clock = clock
        self.counts = Counts()

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Sends it now and fills the record. What goes wrong is the record's error, not an exception."""
        counts, answer = self.counts, _Answer(record, self.clock.start, self.counts)
        record.max_tokens = request.max_tokens
        counts.sent += 1
        record.sent = self.clock()
        try:
            status, body = await self.http.post(self.route, request.body, answer.feed)
            if status == 200:
                answer.finish()
            else:
                record.error = (f"HTTP {status}", error_message(body))
        except RequestFailedError as error:
            record.error = (error.cause, error.example)
        except asyncio.CancelledError:
            counts.sent -= 1
            raise
        record.ended = self.clock()
        if record.error is None:
            counts.done += 1
        else:
            counts.failed += 1


class _Answer:
    """One stream's events, as they arrive, into its record."""

    def __init__(self, record: RequestRecord, start: float, counts: Counts) -> None:
        self.record = record
        self.start = start  # of the run, by time.perf_counter
        self.counts = counts
        self.events = EventBuffer()
        self.counted = 0  # tokens in the pieces so far, where pieces say; else pieces
        self.total: int | None = None  # tokens by the server's own count
        self.running_usage = False  # whether every piece comes with that count
        self.complete = False
        self.usual: tuple[bytes, bytes] | None = None  # what is around the text of a piece of one token

    def feed(self, data: bytes, read_at: float) -> None:
        """Takes bytes that were read at a moment of `time.perf_counter`."""
        now = read_at - self.start
        for event in self.events.feed(data):
            if self._is_usual(event):
                self._count(1, now)
            else:
                self._take(event, now)

    def _is_usual(self, event: bytes) -> bool:
        """Whether it differs from an earlier piece of one token in its text alone, and has one. Most do, and need not
        be parsed.
        """
        if self.usual is None:
            return False
        head, tail = self.usual
        end = len(event) - len(tail)
        return (
            end > len(head)
            and event.startswith(head)
            and event.endswith(tail)
            and event.find(QUOTE, len(head), end) < 0
            and event[end - 1] != BACKSLASH
        )

    def _take(self, data: bytes, now: float) -> None:
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
                self._piece(data, choices[0], now, counted=bool(usage))
            elif "error" in event:
                raise RequestFailedError("error in the stream", error_message(data))
        except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
            raise RequestFailedError("unreadable event", data.decode(errors="replace")[:200]) from None

    def _piece(self, data: bytes, choice: dict[str, Any], now: float, *, counted: bool) -> None:
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
            said = [choice.get("text"), *_said(choice.get("delta") or {})]
            carried = 1 if any(said) else 0
            record.gaps_per_token &= carried == 0
            if carried and not choice.get("finish_reason"):
                self.usual = _around(data, said[0] or said[1])
        if carried > 0:
            self._count(carried, now)

    def _count(self, carried: int, now: float) -> None:
        record = self.record
        self.counted += carried
        self.counts.pieces += 1
        if record.last_token is None:
            record.first_token = now
        elif carried == 1:
            record.gaps.append(now - record.last_token)
        else:
            record.gaps.extend([(now - record.last_token) / carried] * carried)
        record.last_token = now

    def finish(self) -> None:
        """Raises RequestFailedError when the answer did not come to its end."""
        if not self.complete:
            raise RequestFailedError("answer broken off", f"after {self.counted} tokens, without an end")
        self.record.output_tokens = self.counted if self.total is None else self.total
        if self.counted == self.total:
            self.record.gaps_per_token = True  # every piece was one token after all


def _said(delta: dict[str, Any]) -> list[Any]:
    return [delta.get(key) for key in ("content", "reasoning_content", "reasoning", "tool_calls")]


def _around(data: bytes, text: object) -> tuple[bytes, bytes] | None:
    """The event's bytes before and after its text; None where the text is not found as it was expected."""
    if not isinstance(text, str):
        return None
    quoted = orjson.dumps(text)
    for key in TEXT_KEYS:
        head, found, tail = data.partition(key + quoted)
        if found:
            return head + key + QUOTE, QUOTE + tail
    return None
