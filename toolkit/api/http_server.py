"""uvicorn with the application, in one process."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from toolkit.api.app import make_app
from toolkit.api.http.connections.connection import Connection, ConnectionPool
from toolkit.api.http.connections.kept_connection import KeptConnection
from toolkit.api.http.connections.last_will import Slot
from toolkit.api.http.connections.listener import Acceptor, max_connections, tls
from toolkit.api.http.layers.tracing import Tracer
from toolkit.api.http.server import Server

CLOSE_TIMEOUT = 10.0  # seconds for clients to read the end of their responses
KEEP_ALIVE = 75  # seconds until an idle connection is closed
HANDSHAKE_TIMEOUT = 30.0  # seconds


class HTTPServer:
    """Serves the connections of a listening socket, and connections that it is given."""

    def __init__(self, server: Server) -> None:
        config = server.config
        self._models, self._templates = server.models, server.templates
        self._background, self._sound = server.background, server.sound
        self._request_timeout = config.request_timeout
        endpoint = config.otlp_traces_endpoint
        self._tracer = Tracer(endpoint) if endpoint else None
        self.gate = make_app(server, self._tracer)
        # uvicorn waits for open connections without a limit. The caller of `drain` sets one.
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
        self._pool = self._server.server_state = ConnectionPool(max_connections())
        self._connecting: set[asyncio.Task[Any]] = set()
        self._acceptor: Acceptor | None = None

    async def start(self, listener: socket.socket | None = None) -> None:
        """Start to serve. Returns when connections are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[]))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()
        if listener is not None:
            self._acceptor = Acceptor(listener, self.serve)
        self._expire()

    def has_room(self) -> bool:
        """Return True if another connection can be served now."""
        return self._pool.has_room(len(self._connecting))

    def serve(self, connection: socket.socket, slot: Slot | None = None) -> bool:
        """Serve an accepted connection. Returns False if there is no room for it now.

        `slot`: for its last will, if another process keeps the connection, too."""
        if not self.has_room():
            return False
        loop = asyncio.get_running_loop()
        connection.setblocking(False)
        make = Connection if slot is None else partial(KeptConnection, slot, connection)

        def protocol() -> asyncio.Protocol:
            return make(config=self._config, server_state=self._pool, app_state={}, _loop=loop)

        context = self._config.ssl
        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(
                protocol,
                connection,
                ssl=context,
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT if context is not None else None,
            )
        )
        self._connecting.add(connecting)
        if context is not None:  # else it is connected at once
            self._pool.wait(connecting, connecting.cancel)
        connecting.add_done_callback(self._connected)
        return True

    def _connected(self, connecting: asyncio.Task[Any]) -> None:
        self._connecting.discard(connecting)
        self._pool.stop_waiting(connecting)
        if not connecting.cancelled():
            connecting.exception()  # retrieve and ignore it: the TLS handshake failed

    def _expire(self) -> None:
        """End requests that exceed the time limit, periodically."""
        if self._request_timeout is not None:
            for model in self._models:
                model.engine.expire(self._request_timeout)
            interval = min(1.0, self._request_timeout / 4)
            self._expiring = asyncio.get_running_loop().call_later(interval, self._expire)

    @property
    def num_active(self) -> int:
        """Requests for model work that are not completely answered."""
        return self.gate.num_active + len(self._background)

    async def drain(self) -> None:
        """Refuse new work and wait until all accepted requests are answered."""
        self.gate.access_control.is_draining = True
        while self.num_active:
            await asyncio.sleep(0.02)

    async def shut_down(self) -> None:
        """Close every connection at the end of its current response."""
        self.gate.access_control.is_draining = True
        if self._acceptor is not None:
            self._acceptor.close()
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving, CLOSE_TIMEOUT)
        await self._templates.close()
        if self._sound is not None:
            await asyncio.to_thread(self._sound.close)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers. Ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
