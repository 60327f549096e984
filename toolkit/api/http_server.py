"""uvicorn around the application, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn

from toolkit.api.app import make_app
from toolkit.api.http.connection import Connection
from toolkit.api.http.listener import tls
from toolkit.api.http.service import Service
from toolkit.api.http.tracing import Tracer

CLOSE_TIMEOUT = 10.0
"""Seconds that open connections get to take in the end of their answers."""
KEEP_ALIVE = 75
"""Seconds after which an idle connection is closed."""


class HTTPServer:
    """Serves connections: those of a listening socket, and those that it is given."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._engine, self._request_timeout = service.engine, config.request_timeout
        endpoint = config.otlp_traces_endpoint
        self._tracer = Tracer(endpoint, service.model_name) if endpoint else None
        self.gate = make_app(service, self._tracer)
        # uvicorn waits for open connections without a limit of its own: whoever drains has one.
        self._config = uvicorn.Config(
            self.gate,
            http=Connection,
            ws="none",
            log_config=None,
            log_level=config.uvicorn_log_level,
            access_log=not config.disable_uvicorn_access_log,
            timeout_keep_alive=KEEP_ALIVE,
            lifespan="off",
            server_header=False,
            proxy_headers=bool(config.forwarded_allow_ips),
            forwarded_allow_ips=list(config.forwarded_allow_ips),
            root_path=config.root_path,
        )
        self._config.load()
        self._config.ssl = tls(config)
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
        self._expire()

    def serve(self, connection: socket.socket) -> None:
        """Takes over a connection that somebody else has accepted."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.Protocol:
            made: asyncio.Protocol = self._config.http_protocol_class(  # type: ignore[call-arg]  # of one of several classes
                config=self._config,
                server_state=self._server.server_state,
                app_state={},
                _loop=loop,
            )
            return made

        joining = asyncio.ensure_future(
            loop.connect_accepted_socket(protocol, connection, ssl=self._config.ssl)
        )
        self._joining.add(joining)
        joining.add_done_callback(self._joined)

    def _joined(self, joining: asyncio.Task[object]) -> None:
        self._joining.discard(joining)
        if not joining.cancelled():
            joining.exception()  # a client that did not get through the TLS handshake: its affair

    def _expire(self) -> None:
        """Ends requests that take too long, now and again."""
        if self._request_timeout is not None:
            self._engine.expire(self._request_timeout)
            interval = min(1.0, self._request_timeout / 4)
            self._expiring = asyncio.get_running_loop().call_later(interval, self._expire)

    async def drained(self) -> None:
        """Refuses new work, and waits until all that was accepted is answered."""
        self.gate.door.draining = True
        while self.gate.num_active:
            await asyncio.sleep(0.02)

    async def end(self) -> None:
        """Closes all connections, at the end of the answers that they are in."""
        self.gate.door.draining = True
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving, CLOSE_TIMEOUT)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
