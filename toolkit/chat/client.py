"""Asks a server and streams what it answers."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import httpx
import orjson

from toolkit.bench.wire import DONE, EventBuffer, ServerError, error_message, goes_through_proxy
from toolkit.chat.conversation import Message
from toolkit.config.clients import ChatConfig

TIMEOUT = httpx.Timeout(10.0, read=None)  # a long queue or a long thought is no failure; Ctrl-C ends the wait


@dataclass(slots=True)
class AnswerStats:
    """How fast an answer came. Times are seconds after the question was sent."""

    started: float = 0.0  # monotonic
    first: float | None = None
    last: float | None = None
    pieces: int = 0
    tokens: int | None = None  # by the server's count, which comes with the end of an answer

    def piece(self) -> None:
        now = time.monotonic() - self.started
        if self.first is None:
            self.first = now
        self.last = now
        self.pieces += 1

    def line(self) -> str:
        """`42 tokens, 57.3 tok/s, first after 0.04 s`; empty when nothing came."""
        if self.first is None or self.last is None:
            return ""
        tokens = self.pieces if self.tokens is None else self.tokens
        parts = [f"{'~' if self.tokens is None else ''}{tokens:,} token{'s' if tokens != 1 else ''}"]
        if tokens > 1 and self.last > self.first:
            parts.append(f"{(tokens - 1) / (self.last - self.first):,.1f} tok/s")
        parts.append(f"first after {self.first:.2f} s")
        return ", ".join(parts)


class ChatClient:
    """One server and one of its models."""

    def __init__(
        self, url: str, config: ChatConfig, *, api_key: str | None, model: str | None = None
    ) -> None:
        self.url = url
        self.config = config
        self.model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT, trust_env=goes_through_proxy(url)
        )

    def close(self) -> None:
        self.http.close()

    def first_model(self) -> str:
        """The first model that the server lists, which becomes the one to ask. Raises ServerError."""
        try:
            response = self.http.get("/v1/models", timeout=10.0)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != 200:
            raise self._refused(response.status_code, response.content)
        try:
            self.model = str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url} lists no model: it is not an OpenAI-compatible server.") from None
        return self.model

    def ask(self, messages: list[Message], stats: AnswerStats) -> Generator[str]:
        """The answer, piece by piece. Closing the generator, or an exception in it, closes the connection.

        Raises ServerError when the server cannot be reached, refuses, or breaks off.
        """
        body: dict[str, Any] = {
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        settings = {
            "model": self.model,
            "temperature": self.config.temperature,
            "max_tokens": self.config.max_tokens,
        }
        body |= {name: value for name, value in settings.items() if value is not None}
        stats.started = time.monotonic()
        try:
            with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    raise self._refused(response.status_code, response.read())
                yield from self._pieces(response, stats)
        except httpx.ConnectError as error:
            raise self._unreachable(error) from None
        except httpx.HTTPError as error:
            raise ServerError(f"The connection to {self.url} broke off ({error}).") from None

    def _pieces(self, response: httpx.Response, stats: AnswerStats) -> Generator[str]:
        events = EventBuffer()
        ended = False
        for data in response.iter_bytes():
            for event in events.feed(data):
                if event == DONE:
                    return
                content, finished, tokens = read_event(event)
                ended |= finished
                if tokens is not None:
                    stats.tokens = tokens
                if content:
                    stats.piece()
                    yield content
        if not ended:
            raise ServerError("The server broke the answer off.")

    def _unreachable(self, error: Exception) -> ServerError:
        return ServerError(f"No server answers at {self.url} ({error}).")

    def _refused(self, status: int, body: bytes) -> ServerError:
        reason = error_message(body)
        if status in (401, 403):
            return ServerError(f"The server at {self.url} wants another API key (--api-key): {reason}")
        return ServerError(f"The server at {self.url} refused (HTTP {status}): {reason}")


def read_event(data: bytes) -> tuple[str, bool, int | None]:
    """(text, whether the answer ends here, tokens of the whole answer) of one event. Raises ServerError."""
    try:
        event = orjson.loads(data)
        if event.get("error"):
            raise ServerError(f"The server gave up on the answer: {error_message(data)}")
        usage = event.get("usage") or {}
        choice = (event.get("choices") or [{}])[0]
        content = (choice.get("delta") or {}).get("content") or ""
        return content, bool(choice.get("finish_reason")), usage.get("completion_tokens")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        raise ServerError(f"The server sent something unreadable: {data[:200]!r}") from None
