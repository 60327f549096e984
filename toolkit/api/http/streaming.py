"""Server-sent events, and cancellation of requests whose client has disconnected."""

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
from toolkit.engine.front.request_stats import current_stats
from toolkit.errors import ServerUnavailableError, ToolkitError

logger = logging.getLogger(__name__)

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients ignore
SERVER_SEND = "tk.send"
"""Key of a scope: uvicorn's own `send`. The layers of the application wrap `send`, which costs time
per token; they only look at the start of a response."""
LAST_WILL = "tk.last_will"
"""Key of a scope: function that takes the event which ends the stream if this process dies, and
None before the regular end. Absent if no other process could send it."""
LOST_WORKER = ServerUnavailableError(
    "The server process that was answering this request has ended unexpectedly. Send it again."
)
TEXT_SLOT = "\0"  # placeholder for a text. It cannot occur in a model name or an id
_encoder = msgspec.json.Encoder()


class ClientDisconnectedError(Exception):
    """The client has closed the connection."""


def event(value: Any) -> bytes:
    """Return the bytes of an event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


class EventTemplate:
    """Events that differ only in one text. The rest is encoded once."""

    def __init__(self, example: Any) -> None:
        """`example`: the event with TEXT_SLOT in place of the text."""
        self._head, _, self._tail = event(example).partition(_encoder.encode(TEXT_SLOT))

    def event(self, text: str) -> bytes:
        """Return the bytes of the event with this text."""
        return self._head + _encoder.encode(text) + self._tail


class EventStream(Response):
    """Sends what a generator yields. If the client disconnects, closes the generator at once."""

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
        """`end` is always called last: a generator that never started has not run its `finally`.

        `keep_alive`: idle seconds after which a comment is sent; 0: never. `error_event`: bytes of
        an error after the first byte, which ends the stream. Called for the last will, too."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._end = end
        self._keep_alive = keep_alive or None
        self._error_event = error_event
        self._is_sending = False
        self._is_idle = True  # nothing was sent since the last check for a comment

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send_body = scope.get(SERVER_SEND, send)
        leave_will = scope.get(LAST_WILL, lambda event: None)
        sending = asyncio.ensure_future(self._send_all(send, send_body, leave_will))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            while not (
                await asyncio.wait(
                    {sending, gone}, timeout=self._keep_alive, return_when=asyncio.FIRST_COMPLETED
                )
            )[0]:
                if self._is_idle and not self._is_sending:
                    await send_body(
                        {"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True}
                    )
                self._is_idle = True
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

    async def _send_all(
        self, send: Send, send_body: Send, leave_will: Callable[[bytes | None], None]
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        leave_will(self._error_event(LOST_WORKER))
        async with aclosing(self._events) as events:
            try:
                async for chunk in events:
                    self._is_sending, self._is_idle = True, False
                    await send_body(
                        {"type": "http.response.body", "body": chunk, "more_body": True}
                    )
                    self._is_sending = False
                self._is_sending = True
            except (OSError, asyncio.CancelledError):
                raise
            except Exception as error:
                self._is_sending = True
                _record_error(error)
                chunk = self._error_event(error)
                await send_body({"type": "http.response.body", "body": chunk, "more_body": True})
        leave_will(None)
        await send_body({"type": "http.response.body", "body": b"", "more_body": False})


def _record_error(error: Exception) -> None:
    """Let the gate count an error of a response whose status is already sent."""
    if (record := current_stats.get()) is not None:
        record.error = error
    if not isinstance(error, ToolkitError):
        logger.error("internal error in a streamed response", exc_info=error)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; cancel it if the client disconnects. Raises ClientDisconnectedError then."""
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
