"""Server-sent events, and the end of requests whose client has gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from toolkit.api.http.error_bodies import error_body
from toolkit.engine.request_stats import current_record
from toolkit.errors import ToolkitError

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients pass over."""
SERVER_SEND = "tk.send"
"""Key of a scope: the server's own `send`, below every layer of the application. Those look at the beginning of an answer
and pass its body on, at a cost for each token.
"""
HOLE = "\0"
"""What no model's name and no identifier is."""
_encoder = msgspec.json.Encoder()


class ClientDisconnectedError(Exception):
    """Nobody waits for the answer any more."""


def event(value: Any) -> bytes:
    """One event's bytes."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventTemplate:
    """Events that differ in one text alone: encoded once, but for that text."""

    def __init__(self, example: Any) -> None:
        """`example`: the event with HOLE in the text's place."""
        self._head, _, self._tail = event(example).partition(_encoder.encode(HOLE))

    def event(self, text: str) -> bytes:
        """The bytes of the event with this text."""
        return self._head + _encoder.encode(text) + self._tail


class EventStream(Response):
    """Sends what a generator yields as it comes. When the client goes, the generator is closed at once,
    wherever it waits. Where nothing has come for `keep_alive` seconds (0: however long), a comment is sent.

    An error after the first byte is sent as `error_event` makes it, and ends the stream. `end` is called in the end,
    come what may: a generator that was never begun has no `finally` of its own.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        end: Callable[[], None],
        keep_alive: float = 0.0,
        error_event: Callable[[Exception], bytes] = lambda error: (
            b"data: " + error_body(error) + b"\n\n" + DONE
        ),
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._keep_alive = keep_alive or None
        self._error_event = error_event
        self._sending = False
        self._silent = True
        """Whether nothing has been sent since it was last looked at, so that a comment is due."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get(SERVER_SEND, send)
        sending = asyncio.ensure_future(self._send_all(send, send_body))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not (
                await asyncio.wait(
                    {sending, gone}, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                )
            )[0]:
                if self._silent and not self._sending:
                    await send_body(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )
                self._silent = True
        finally:
            gone.cancel()
            if not sending.done():
                sending.cancel()
            self._end()
            await asyncio.gather(sending, gone, return_exceptions=True)
        if (
            not sending.cancelled()
            and (error := sending.exception()) is not None
            and not isinstance(error, OSError)
        ):
            raise error

    async def _send_all(self, send: Send, send_body: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    self._sending, self._silent = True, False
                    await send_body(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                    self._sending = False
                self._sending = True
            except (OSError, asyncio.CancelledError):
                raise
            except Exception as error:
                self._sending = True
                _note(error)
                chunk = self._error_event(error)
                await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


def _note(error: Exception) -> None:
    """Has the gate count an error that its status does not tell of."""
    if (record := current_record.get()) is not None:
        record.error = error
    if not isinstance(error, ToolkitError):
        logger.error("a streamed answer could not be finished", exc_info=error)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes. Raises ClientDisconnectedError then."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnectedError
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
