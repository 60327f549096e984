"""HTTP connection: uvicorn's, with limits on what a client may send and on how slowly it reads."""

import asyncio
import http
import logging
import time
from collections.abc import Callable
from itertools import islice

from starlette.types import ASGIApp, Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from toolkit.api.http.connections.listener import RAISE_LIMIT, Spells
from toolkit.api.http.error_bodies import error_body
from toolkit.errors import InvalidRequestError, ToolkitError

logger = logging.getLogger(__name__)

MAX_HEAD = 64 * 2**10  # bytes of a request's line and headers
HEAD_TIMEOUT = 30.0  # seconds to receive them
MAX_PIPELINED = 32  # requests of one connection that wait for the response to an earlier one
MAX_UNREAD = 64 * 2**20  # bytes that are discarded after an early response
EVICTION_AGE = 0.25  # seconds that a connection waits before it gives way to a new one
UNREAD_TIMEOUT = 10.0  # seconds for them, and for the client to read the last response
WRITE_TIMEOUT = 60.0  # seconds in which a client reads nothing of a response


class ConnectionPool(ServerState):
    """Open connections of a process. One that waits for its client gives way to a new one."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self._spells = Spells()
        self._waiting: dict[object, tuple[float, Callable[[], object]]] = {}
        """(since when, what ends it) per connection that waits for its client, longest first."""

    def wait(self, key: object, end: Callable[[], object]) -> None:
        """Note that a connection waits for its client: for a handshake, a request or its rest, or
        for it to read a response. `end` ends it."""
        self._waiting.setdefault(key, (time.monotonic(), end))

    def stop_waiting(self, key: object) -> None:
        """Note that a connection does not wait for its client."""
        self._waiting.pop(key, None)

    def has_room(self, num_connecting: int) -> bool:
        """Return True if another connection fits. If not, end some that wait for their clients."""
        if len(self.connections) + num_connecting < self.limit:
            return True
        if self._spells.begins():
            logger.warning(
                "All %d connections are in use. New ones wait, and those that wait longest for "
                "their clients are closed. %s",
                self.limit,
                RAISE_LIMIT,
            )
        # One at a time would delay new clients while many connections keep the pool full.
        before = time.monotonic() - EVICTION_AGE
        for key, (since, end) in list(islice(self._waiting.items(), 1 + len(self._waiting) // 64)):
            if since < before:
                del self._waiting[key]
                end()
        return False


class Connection(HttpToolsProtocol):
    """Closes connections that stay silent, never end their requests, or do not send HTTP.

    Sends an error first, or completes the responses to earlier requests instead. What still arrives
    of an answered request is discarded: a reset could destroy the response before it is read. No
    request is started while its client does not read the response to an earlier one."""

    server_state: ConnectionPool
    _size = 0
    """Bytes of the incoming head. Includes what follows the head in its last packet; excludes the
    part in a packet that also has the end of another request."""
    _has_request_end = False  # in the current packet: not all of it is the next head
    _head_timer: asyncio.TimerHandle | None = None  # set while a head is incoming
    _running: RequestResponseCycle | None = None
    """The request being answered. With pipelining it is not the newest one."""
    _is_ending = False  # nothing more is parsed
    _is_closing = False  # no more requests are started
    _is_held = False  # the client has to read before the next request starts
    _num_unread = 0  # bytes discarded since the last response
    _unread_timer: asyncio.TimerHandle | None = None  # set while data are discarded
    _write_timer: asyncio.TimerHandle | None = None  # set while the client does not read

    def connection_made(  # type: ignore[override]  # as uvicorn declares it
        self, transport: asyncio.Transport
    ) -> None:
        """Start the timer of the first head."""
        super().connection_made(transport)
        self._raw_transport = transport
        self.transport = _Closer(transport, self)  # type: ignore[assignment]  # what uvicorn uses
        self._start_head_timer()
        self._note_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers, and report the disconnect to the request being answered."""
        self._stop_head_timer()
        self._stop_unread_timer()
        self._stop_write_timer()
        self._is_closing = True
        self.server_state.stop_waiting(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, and check the size of the head or of unread data."""
        if self._unread_timer is not None:
            self._num_unread += len(data)
            if self._num_unread > MAX_UNREAD:
                self.abort()
                return
        if self._is_ending:
            return
        self._has_request_end = False
        super().data_received(data)
        if self._head_timer is not None and not self._has_request_end:
            self._size += len(data)
            if self._size > MAX_HEAD:
                self._reject(431, f"The request's headers are larger than {MAX_HEAD // 2**10} KiB.")

    def on_message_begin(self) -> None:
        """Start the timer of a head. Raises InvalidRequestError if too many requests wait."""
        if len(self.pipeline) >= MAX_PIPELINED:  # ends the connection after their responses
            raise InvalidRequestError(f"More than {MAX_PIPELINED} requests wait.")
        super().on_message_begin()
        if self._head_timer is None:
            self._start_head_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store a header. Those after a body are dropped: their number has no limit."""
        if self._head_timer is not None:
            super().on_header(name, value)

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
        self._stop_unread_timer()
        if self._is_closing:
            self._flush_and_close()
        self._note_waiting()

    def on_response_complete(self) -> None:
        """Start the next request, once the client reads. Limit the rest of the answered one."""
        if self.flow.write_paused and not self._is_closing:
            self._is_held = True
            return
        super().on_response_complete()
        if self.cycle.more_body and self.cycle.response_complete and not self._is_closing:
            self._start_unread_timer()
        self._note_waiting()

    def pause_writing(self) -> None:
        """Start the timer of a client that does not read."""
        super().pause_writing()
        self._start_write_timer()
        self._note_waiting()

    def resume_writing(self) -> None:
        """Stop the timer. Start a request that waited for it."""
        super().resume_writing()
        self._stop_write_timer()
        if self._is_closing:  # what is left fits the buffer, and still has to be sent
            self._start_write_timer()
        if self._is_held:
            self._is_held = False
            self.on_response_complete()
        self._note_waiting()

    def close(self) -> None:
        """Close the connection, after what the client may still send if it is not all read."""
        if self._is_closing:
            return
        self._is_closing = True
        self._stop_head_timer()
        if self._is_ending or (self.cycle is not None and self.cycle.more_body):
            self._start_unread_timer()
            self.flow.resume_reading()
            if self._raw_transport.can_write_eof():
                self._raw_transport.write_eof()
        else:
            self._flush_and_close()

    def abort(self) -> None:
        """End the connection at once."""
        self._is_closing = True
        for cycle in filter(None, (self._running, self.cycle)):
            cycle.disconnected = True  # writing would fail from now on
        self._raw_transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Reject data that is not HTTP."""
        self._reject(400, msg)

    def _start_asgi_task(  # type: ignore[override]  # as uvicorn declares it
        self, cycle: RequestResponseCycle, app: ASGIApp
    ) -> None:
        if self._is_closing:
            return
        if self._is_held:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))  # type: ignore[arg-type]
            return
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # Starlette's own types

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: the request is answered as if it did not ask for an upgrade."""

    def _note_waiting(self) -> None:
        """Let the pool end the connection, unless a request is being answered and read."""
        running = self._running
        if (
            running is None
            or running.response_complete
            or running.more_body
            or self.flow.write_paused
        ):
            self.server_state.wait(self, self.abort)
        else:
            self.server_state.stop_waiting(self)

    def _start_head_timer(self) -> None:
        self._size = 0
        message = f"The request's headers did not arrive within {HEAD_TIMEOUT:g} s."
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self._reject, 408, message)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_unread_timer(self) -> None:
        if self._unread_timer is None:
            self._num_unread = 0
            self._unread_timer = self.loop.call_later(UNREAD_TIMEOUT, self.abort)

    def _stop_unread_timer(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _start_write_timer(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(WRITE_TIMEOUT, self.abort)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _flush_and_close(self) -> None:
        self._is_ending = True
        self._start_write_timer()
        self._raw_transport.close()

    def _reject(self, status: int, message: str) -> None:
        """End the connection with an error, or with the responses to earlier, complete requests."""
        self._stop_head_timer()
        self._is_ending = True
        if self.transport.is_closing():
            return
        if self.pipeline and self.pipeline[0][0].more_body:  # the invalid data is in its body
            self.pipeline.popleft()
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is not None and not last.more_body and not last.response_complete:
            last.keep_alive = False
            return
        if last is None or not (last.more_body and last.response_started):
            self.transport.write(last_response(status, InvalidRequestError(message)))
        if last is not None:
            last.disconnected = True
        self.transport.close()


def last_response(status: int, error: ToolkitError) -> bytes:
    """Return the bytes of an error response after which the connection is closed."""
    body = error_body(error)
    head = (
        f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class _Closer:
    """A connection's transport, as uvicorn uses it. `close` is the connection's."""

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self.write = transport.write
        self.close = connection.close
        self._connection = connection

    def is_closing(self) -> bool:
        """Return True if no more requests are started."""
        return self._connection._is_closing or self._connection._raw_transport.is_closing()


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
