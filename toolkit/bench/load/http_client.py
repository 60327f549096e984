"""HTTP/1.1 client of the load generator: one callback per read, no task or future per body chunk.

A general client spends more time on a server-sent event than the server does, so a benchmark would
measure the client."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from toolkit.client.trust import TRUST, Trust, unreachable
from toolkit.client.wire import RequestFailedError
from toolkit.config.load import BenchConfig

IDLE_LIMIT = 4.0
"""Seconds after which an idle connection is not reused: common servers close it after 5."""

CONNECT_TIMEOUT = 30.0  # seconds

OnChunk = Callable[[bytes, float], None]
"""Called with a chunk of a body and the time it was read, by `time.perf_counter`."""


def client_of(config: BenchConfig) -> HTTPClient:
    """Return a client of the server that a load is for."""
    trust = Trust(config.cacert, config.insecure)
    return HTTPClient(config.url, config.api_key, config.header, trust)


class HTTPClient:
    """Keep-alive connections to one server: one for each request in flight."""

    def __init__(
        self,
        url: str,
        api_key: str | None,
        headers: Iterable[str] = (),
        trust: Trust = TRUST,
    ) -> None:
        """`headers`: extra headers of every request, as KEY=VALUE."""
        parts = urlsplit(url)
        self._url = url
        self._host = parts.hostname or ""
        self._ssl = trust.context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        extra = "".join(
            f"{name}: {value}\r\n" for name, _, value in (h.partition("=") for h in headers)
        )
        host = parts.netloc.rpartition("@")[2]
        self._fields = f"Host: {host}\r\nAccept-Encoding: identity\r\n{key}{extra}".encode()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # transports close in the loop's next iteration

    async def get(self, path: str, timeout: float) -> tuple[int, bytes]:
        """Return (status, body). Raises RequestFailedError, and UntrustedError for https://."""
        try:
            async with asyncio.timeout(timeout):
                return await self._send(b"GET", path, b"", None)
        except TimeoutError:
            raise RequestFailedError("timeout", f"no answer in {timeout:g} s") from None

    async def post(
        self, path: str, body: bytes, on_chunk: OnChunk, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """Send a body and return (status, answer); with status 200 that goes to `on_chunk` instead.

        Raises RequestFailedError, UntrustedError, and any exception of `on_chunk`."""
        return await self._send(b"POST", path, body, on_chunk, content_type)

    async def _send(
        self,
        method: bytes,
        path: str,
        body: bytes,
        on_chunk: OnChunk | None,
        content_type: str = "",
    ) -> tuple[int, bytes]:
        head = b"%s %s HTTP/1.1\r\n%s" % (method, (self._path + path).encode(), self._fields)
        if body:
            head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n".encode()
        connection = self._idle_connection() or await self._connect()
        try:
            response = await connection.exchange(head + b"\r\n" + body, on_chunk)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    def _idle_connection(self) -> _Connection | None:
        oldest = time.perf_counter() - IDLE_LIMIT
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and connection.last_used > oldest:
                return connection
            connection.close()
        return None

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._open), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise RequestFailedError("timeout", "the connection took too long") from None
        except ssl.SSLCertVerificationError as error:
            raise unreachable(self._url, error) from None
        except OSError as error:
            raise RequestFailedError("cannot connect", error.strerror or str(error)) from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection with one request at a time. It adds itself to the set of open connections."""

    def __init__(self, open_connections: set[_Connection]) -> None:
        self._open_connections = open_connections
        self._transport: asyncio.Transport | None = None
        self._response: asyncio.Future[tuple[int, bytes]] | None = None
        self.is_reusable = False
        self.last_used = 0.0

    async def exchange(self, request: bytes, on_chunk: OnChunk | None) -> tuple[int, bytes]:
        """Send a request and wait for the end of its response."""
        self._on_chunk = on_chunk
        self._parser = httptools.HttpResponseParser(self)
        self._has_headers = self._has_length = self._is_complete = self.is_reusable = False
        self._body: list[bytes] = []
        self._response = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise RequestFailedError(
                "connection closed by the server", "before the request was sent"
            )
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports share no base class with asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._response is None or self._response.done():
            self.close()  # unsolicited data
            return
        try:
            self._parser.feed_data(data)
            if self._body and self._is_streaming:
                chunks, self._body = self._body, []
                assert self._on_chunk is not None
                self._on_chunk(chunks[0] if len(chunks) == 1 else b"".join(chunks), now)
        except httptools.HttpParserError as error:
            self._fail(RequestFailedError("malformed response", str(error)))
        except Exception as error:
            self._fail(error)
        else:
            if self._is_complete:
                self.is_reusable = self._keep_alive
                self.last_used = now
                self._succeed()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        self._transport = None
        self._open_connections.discard(self)
        if self._response is None or self._response.done():
            return
        if not self._has_headers:
            self._fail(
                RequestFailedError(
                    "connection closed by the server", str(error or "before it answered")
                )
            )
        elif self._has_length:
            self._fail(
                RequestFailedError("incomplete answer", str(error or "the connection was closed"))
            )
        else:
            self._succeed()  # a response without a length ends with the connection

    # ---- called by the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # ---- end of an exchange

    @property
    def _is_streaming(self) -> bool:
        return self._on_chunk is not None and self._parser.get_status_code() == 200

    def _succeed(self) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_result((self._parser.get_status_code(), b"".join(self._body)))

    def _fail(self, error: Exception) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)
        self.close()
