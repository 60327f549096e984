"""One HTTP connection: uvicorn's, with limits on what comes before a request is one, and answers to what is none."""

from __future__ import annotations

import asyncio
import http

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from toolkit.api.http.error_bodies import error_body
from toolkit.errors import InvalidRequestError

MAX_HEAD = 64 * 2**10
"""Bytes of a request's line and headers."""
HEAD_TIMEOUT = 30.0
"""Seconds that they get to come in."""


class Connection(HttpToolsProtocol):
    """Closes connections that open and say nothing, never end their headers, or send what is no HTTP. It says why, unless there is an
    answer to send, after which it closes.
    """

    _size = 0
    """Bytes of the head that is coming in; may count what follows in its packet, and leaves out what came together with another request."""
    _shared = False
    """Whether the packet that is being read has the end of a request, so that not all of it is the next one's head."""
    _waiting: asyncio.TimerHandle | None = None
    """Until the head has come in."""
    _running: RequestResponseCycle | None = None
    """The request that is being answered: not the newest, when several have come in one go."""
    _ending = False
    """Whether what came behind the last request was none: nothing more is read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Gives the client some time to say what it wants."""
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forgets what was awaited, and tells the request that is being answered."""
        self._expect_no_head()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feeds the parser, and counts while it is in a head."""
        if self._ending:
            return
        self._shared = False
        super().data_received(data)
        if self._waiting is not None and not self._shared:
            self._size += len(data)
            if self._size > MAX_HEAD:
                self._refuse(431, f"The request's headers are larger than {MAX_HEAD // 2**10} KiB.")

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        if self._waiting is None:
            self._expect_head()

    def on_headers_complete(self) -> None:
        """The head has come in."""
        self._expect_no_head()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _end_by_closing(self.cycle)

    def on_message_complete(self) -> None:
        """The body has come in, be it after the answer."""
        super().on_message_complete()
        self.cycle.more_body = False
        self._shared = True

    def send_400_response(self, msg: str) -> None:
        """Answers what is no HTTP."""
        self._refuse(400, msg)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]  # as uvicorn's
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # Starlette's types of the same

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: it is the client's mistake, and answered as if it had not asked."""

    def _expect_head(self) -> None:
        self._size = 0
        message = f"The request's headers did not come within {HEAD_TIMEOUT:g} s."
        self._waiting = self.loop.call_later(HEAD_TIMEOUT, self._refuse, 408, message)

    def _expect_no_head(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _refuse(self, status: int, message: str) -> None:
        """Ends the connection: with an error, or with the answers to the requests that had come in whole."""
        self._expect_no_head()
        if self.transport.is_closing():
            return
        if self.pipeline and self.pipeline[0][0].more_body:  # it is this one's body that is nothing
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and not last.more_body and not last.response_complete:
            last.keep_alive = False
            self._ending = True
            return
        if last is None or not (last.more_body and last.response_started):
            body = error_body(InvalidRequestError(message))
            head = (
                f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        if last is not None:
            last.disconnected = True
        self.transport.close()


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """An answer whose length is not known beforehand comes as it is, and not in chunks, which HTTP/1.0 does not have."""
    send = cycle.send

    async def send_plain(message: Message) -> None:
        cycle.chunked_encoding = False
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)
            cycle.expected_content_length = (
                len(message.get("body", b"")) + more
            )  # what uvicorn checks
        await send(message)  # type: ignore[arg-type]  # Starlette's types of the same

    cycle.send = send_plain  # type: ignore[method-assign, assignment]
