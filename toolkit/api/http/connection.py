"""HTTP connection: uvicorn's, with limits on request heads and error responses to invalid HTTP."""

import asyncio
import contextlib
import http
import socket
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from toolkit.api.http.error_bodies import error_body
from toolkit.api.http.last_will import Slot, State
from toolkit.api.http.streaming import LAST_WILL, LOST_WORKER
from toolkit.errors import InvalidRequestError, ToolkitError

MAX_HEAD = 64 * 2**10  # bytes of a request's line and headers
HEAD_TIMEOUT = 30.0  # seconds to receive them


class Connection(HttpToolsProtocol):
    """Closes connections that stay silent, never end their headers, or do not send HTTP.

    Sends an error first, or completes the responses to earlier requests instead."""

    _size = 0
    """Bytes of the incoming head. Includes what follows the head in its last packet; excludes the
    part in a packet that also has the end of another request."""
    _has_request_end = False  # in the current packet: not all of it is the next head
    _head_timer: asyncio.TimerHandle | None = None  # set while a head is incoming
    _running: RequestResponseCycle | None = None
    """The request being answered. With pipelining it is not the newest one."""
    _is_ending = False  # invalid data followed the last request: nothing more is read

    def connection_made(  # type: ignore[override]  # as uvicorn declares it
        self, transport: asyncio.Transport
    ) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer, and report the disconnect to the request being answered."""
        self._stop_head_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and check the size of the head."""
        if self._is_ending:
            return
        self._has_request_end = False
        super().data_received(data)
        if self._head_timer is not None and not self._has_request_end:
            self._size += len(data)
            if self._size > MAX_HEAD:
                self._reject(431, f"The request's headers are larger than {MAX_HEAD // 2**10} KiB.")

    def on_message_begin(self) -> None:
        """Start the timer of a head."""
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head_timer()

    def on_headers_complete(self) -> None:
        """Stop the timer: the head is complete."""
        self._stop_head_timer()
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            _end_with_connection(self.cycle)

    def on_message_complete(self) -> None:
        """Mark the body as complete, also after the response."""
        super().on_message_complete()
        self.cycle.more_body = False
        self._has_request_end = True

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        self._reject(400, msg)

    def _start_asgi_task(  # type: ignore[override]  # as uvicorn declares it
        self, cycle: RequestResponseCycle, app: ASGIApp
    ) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # Starlette's own types

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered as if it did not ask for an upgrade."""

    def _start_head_timer(self) -> None:
        self._size = 0
        message = f"The request's headers did not arrive within {HEAD_TIMEOUT:g} s."
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._reject, 408, message)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _reject(self, status: int, message: str) -> None:
        """End the connection with an error, or with the responses to earlier, complete requests."""
        self._stop_head_timer()
        if self.transport.is_closing():
            return
        if self.pipeline and self.pipeline[0][0].more_body:  # the invalid data is in its body
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and not last.more_body and not last.response_complete:
            last.keep_alive = False
            self._is_ending = True
            return
        if last is None or not (last.more_body and last.response_started):
            self.transport.write(_last_response(status, InvalidRequestError(message)))
        if last is not None:
            last.disconnected = True
        self.transport.close()


def _last_response(status: int, error: ToolkitError) -> bytes:
    """Return the bytes of an error response after which the connection is closed."""
    body = error_body(error)
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


_UNANSWERED = _last_response(LOST_WORKER.status, LOST_WORKER)


class KeptConnection(Connection):
    """Connection whose descriptor another process keeps. Maintains its last will."""

    transport: "_WatchedTransport"  # type: ignore[assignment]

    def __init__(self, slot: Slot, connection: socket.socket, **options: Any) -> None:
        super().__init__(**options)
        self._slot, self._socket = slot, connection

    def connection_made(  # type: ignore[override]  # as uvicorn declares it
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self.transport = _WatchedTransport(transport, self._slot)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the connection for the other process' descriptor, too, which is closed then."""
        try:
            super().connection_lost(exc)
        finally:
            self._slot.close()
            with contextlib.suppress(OSError):  # the client has closed it
                self._socket.shutdown(socket.SHUT_RDWR)

    def data_received(self, data: bytes) -> None:
        if self._slot.state == State.IDLE:
            self._leave(_UNANSWERED)
        super().data_received(data)

    def _start_asgi_task(  # type: ignore[override]  # as uvicorn declares it
        self, cycle: RequestResponseCycle, app: ASGIApp
    ) -> None:
        self._leave(_UNANSWERED)
        cycle.scope[LAST_WILL] = partial(self._leave_event, cycle)  # type: ignore[literal-required]
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self.transport.is_closing() or self.transport.has_unsent or self.cycle.more_body:
            self._slot.state = State.CUT
        elif self._head_timer is not None:  # the next request has begun
            self._leave(_UNANSWERED)
        else:
            self._slot.state = State.IDLE
        super().on_response_complete()

    def _leave(self, message: bytes) -> None:
        if self._slot.store(message) and not self.transport.has_unsent:
            self._slot.state = State.WILL

    def _leave_event(self, cycle: RequestResponseCycle, event: bytes | None) -> None:
        """Leave an event that ends the response; None: the response's end is next."""
        self.transport.is_streaming = event is not None
        if event is None:
            self._slot.state = State.CUT
        elif cycle.chunked_encoding:
            self._leave(b"%x\r\n%b\r\n0\r\n\r\n" % (len(event), event))
        else:
            self._leave(event)


class _WatchedTransport:
    """A transport. After each write, records whether the connection can be ended by its will."""

    def __init__(self, transport: asyncio.Transport, slot: Slot) -> None:
        self._transport, self._slot = transport, slot
        self._num_unsent = transport.get_write_buffer_size
        self.is_streaming = False  # each write is one or more complete events

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    @property
    def has_unsent(self) -> bool:
        """True if the kernel has not taken everything yet."""
        return self._num_unsent() > 0

    def write(self, data: bytes) -> None:
        if not self.is_streaming:
            self._slot.state = State.CUT
        self._transport.write(data)
        if self.is_streaming:
            self._slot.state = State.CUT if self._num_unsent() else State.WILL


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Send a response of unknown length without chunks, which HTTP/1.0 does not have."""
    send = cycle.send

    async def send_plain(message: Message) -> None:
        cycle.chunked_encoding = False
        if message["type"] == "http.response.body":
            more = message.get("more_body", False)
            cycle.expected_content_length = len(message.get("body", b"")) + more  # for uvicorn
        await send(message)  # type: ignore[arg-type]  # Starlette's own types

    cycle.send = send_plain  # type: ignore[method-assign, assignment]
