"""uvicorn with the application, in one process."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn

from toolkit.api.app import make_app
from toolkit.api.http.connection import Connection, KeptConnection
from toolkit.api.http.last_will import Slot
from toolkit.api.http.listener import tls
from toolkit.api.http.service import Service
from toolkit.api.http.tracing import Tracer

CLOSE_TIMEOUT = 10.0  # seconds for clients to read the end of their responses
KEEP_ALIVE = 75  # seconds until an idle connection is closed


class HTTPServer:
    """Serves the connections of a listening socket, and connections that it is given."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._engine, self._templates = service.engine, service.templates
        self._request_timeout = config.request_timeout
        endpoint = config.otlp_traces_endpoint
        self._tracer = Tracer(endpoint, service.model_name) if endpoint else None
        self.gate = make_app(service, self._tracer)
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
        self._connecting: set[asyncio.Task[object]] = set()

    async def start(self, *listeners: socket.socket) -> None:
        """Start to serve. Returns when connections are accepted."""
        for listener in listeners:
            # Connections inherit the option, so those in TIME_WAIT do not block the port for the
            # next server.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._serving = asyncio.create_task(self._server.serve(sockets=list(listeners)))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.005)
        if self._serving.done():
            self._serving.result()
        self._expire()

    def serve(self, connection: socket.socket, slot: Slot | None) -> None:
        """Serve a connection that another process has accepted.

        `slot`: for its last will, if that process keeps it."""
        loop = asyncio.get_running_loop()
        make = Connection if slot is None else partial(KeptConnection, slot, connection)

        def protocol() -> asyncio.Protocol:
            return make(
                config=self._config,
                server_state=self._server.server_state,
                app_state={},
                _loop=loop,
            )

        connecting = asyncio.ensure_future(
            loop.connect_accepted_socket(protocol, connection, ssl=self._config.ssl)
        )
        self._connecting.add(connecting)
        connecting.add_done_callback(self._connected)

    def _connected(self, connecting: asyncio.Task[object]) -> None:
        self._connecting.discard(connecting)
        if not connecting.cancelled():
            connecting.exception()  # retrieve and ignore it: the TLS handshake failed

    def _expire(self) -> None:
        """End requests that exceed the time limit, periodically."""
        if self._request_timeout is not None:
            self._engine.expire(self._request_timeout)
            interval = min(1.0, self._request_timeout / 4)
            self._expiring = asyncio.get_running_loop().call_later(interval, self._expire)

    async def drain(self) -> None:
        """Refuse new work and wait until all accepted requests are answered."""
        self.gate.access_control.is_draining = True
        while self.gate.num_active:
            await asyncio.sleep(0.02)

    async def shut_down(self) -> None:
        """Close every connection at the end of its current response."""
        self.gate.access_control.is_draining = True
        self._server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._serving, CLOSE_TIMEOUT)
        await self._templates.close()
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers. Ours drain first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
