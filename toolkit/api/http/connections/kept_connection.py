"""A connection of an API worker whose descriptor the first process keeps, with its last will."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from toolkit.api.http.connections.connection import Connection, last_response
from toolkit.api.http.connections.last_will import Slot, State
from toolkit.api.http.streaming import LAST_WILL, LOST_WORKER

_UNANSWERED = last_response(LOST_WORKER.status, LOST_WORKER)


class KeptConnection(Connection):
    """Connection whose descriptor another process keeps. Maintains its last will."""

    _raw_transport: _WatchedTransport  # type: ignore[assignment]

    def __init__(self, slot: Slot, connection: socket.socket, **options: Any) -> None:
        super().__init__(**options)
        self._slot, self._socket = slot, connection

    def connection_made(  # type: ignore[override]  # as uvicorn declares it
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(_WatchedTransport(transport, self._slot))  # type: ignore[arg-type]

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
        if self.transport.is_closing() or self._raw_transport.has_unsent or self.cycle.more_body:
            self._slot.state = State.CUT
        elif self._head_timer is not None:  # the next request has begun
            self._leave(_UNANSWERED)
        else:
            self._slot.state = State.IDLE
        if self._running is not None:
            # It refers to the request, which refers to the scope.
            self._running.scope.pop(LAST_WILL, None)  # type: ignore[misc]
        super().on_response_complete()

    def _leave(self, message: bytes) -> None:
        if self._slot.store(message) and not self._raw_transport.has_unsent:
            self._slot.state = State.WILL

    def _leave_event(self, cycle: RequestResponseCycle, event: bytes | None) -> None:
        """Leave an event that ends the response; None: the response's end is next."""
        self._raw_transport.is_streaming = event is not None
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
