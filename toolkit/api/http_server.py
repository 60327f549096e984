"""uvicorn around the application, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from toolkit.api.app import make_app
from toolkit.api.service import Service

CLOSE_TIMEOUT = 10.0
"""Seconds that open connections get to take in the end of their answers."""
KEEP_ALIVE = 75
"""Seconds after which an idle connection is closed."""


class HTTPServer:
    """Serves connections: those of a listening socket, and those that it is given."""

    def __init__(self, service: Service, api_key: str | None) -> None:
        self.gate = make_app(service, api_key)
        # uvicorn waits for open connections without a limit of its own: whoever drains has one.
        self._config = uvicorn.Config(
            self.gate,
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            lifespan="off",
            server_header=False,
            proxy_headers=False,  # nothing here asks who the client is
        )
        self._server = _Server(self._config)
        self._joining: set[asyncio.Task[object]] = set()

    async def start(self, *listeners: socket.socket) -> None:
        """Returns when it serves."""
        for listener in listeners:
            # Its connections inherit this: those that linger must not keep the next server from the port.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._serving = asyncio.create_task(self._server.serve(sockets=list(listeners)))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()

    def serve(self, connection: socket.socket) -> None:
        """Takes over a connection that somebody else has accepted."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self._config.http_protocol_class(  # type: ignore[call-arg]  # of one of several classes
                config=self._config, server_state=self._server.server_state, app_state={}, _loop=loop
            )
            return made

        joining = asyncio.ensure_future(loop.connect_accepted_socket(protocol, connection))
        self._joining.add(joining)
        joining.add_done_callback(self._joining.discard)

    async def drained(self) -> None:
        """Refuses new work, and waits until all that was accepted is answered."""
        self.gate.draining = True
        while self.gate.num_active:
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        """Closes all connections, at the end of the answers that they are in."""
        self.gate.draining = True
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving, CLOSE_TIMEOUT)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
