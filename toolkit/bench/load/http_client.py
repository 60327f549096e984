"""HTTP/1.1 for the load generator: one callback for each read, no task and no future for each piece of a body.

A general client spends more on a server-sent event than the server does; then it is the client that is measured.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Iterable
from typing import Self, cast
from urllib.parse import urlsplit

import httptools

from toolkit.client.wire import RequestFailedError

IDLE = 4.0
"""Seconds after which an idle connection is not used again: common servers close one after 5."""

CONNECT_TIMEOUT = 30.0
"""Seconds."""

Take = Callable[[bytes, float], None]
"""Gets a piece of a body and the moment at which it was read, by `time.perf_counter`."""


class Http:
    """Connections to one server: as many as there are requests at once, each used again and again."""

    def __init__(self, url: str, api_key: str | None, headers: Iterable[str] = ()) -> None:
        """`headers`: further ones of every request, as KEY=VALUE."""
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._path = parts.path
        key = f"Authorization: Bearer {api_key}\r\n" if api_key is not None else ""
        further = "".join(
            f"{name}: {value}\r\n" for name, _, value in (h.partition("=") for h in headers)
        )
        host = parts.netloc.rpartition("@")[2]
        self._fields = f"Host: {host}\r\nAccept-Encoding: identity\r\n{key}{further}".encode()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # the transports close in the loop's next turn

    async def get(self, path: str, timeout: float) -> tuple[int, bytes]:
        """(status, body). Raises RequestFailedError."""
        try:
            async with asyncio.timeout(timeout):
                return await self._send(b"GET", path, b"", None)
        except TimeoutError:
            raise RequestFailedError("timeout", f"no answer in {timeout:g} s") from None

    async def post(self, path: str, body: bytes, take: Take) -> tuple[int, bytes]:
        """Sends JSON; `take` gets the body of an answer with status 200, piece by piece.

        The result is the status, and the body of an answer with another one. Raises RequestFailedError, and what
        `take` raises.
        """
        return await self._send(b"POST", path, body, take)

    async def _send(
        self, method: bytes, path: str, body: bytes, take: Take | None
    ) -> tuple[int, bytes]:
        head = b"%s %s HTTP/1.1\r\n%s" % (method, (self._path + path).encode(), self._fields)
        if body:
            head += b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
        connection = self._free_one() or await self._connect()
        try:
            answer = await connection.exchange(head + b"\r\n" + body, take)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def _free_one(self) -> _Connection | None:
        newest = time.perf_counter() - IDLE
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable and connection.last_used > newest:
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
            raise RequestFailedError("timeout", "no connection in time") from None
        except OSError as error:
            raise RequestFailedError("cannot connect", error.strerror or str(error)) from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, one request at a time. `everyone` holds the open ones."""

    def __init__(self, everyone: set[_Connection]) -> None:
        self._everyone = everyone
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[tuple[int, bytes]] | None = None
        self.reusable = False
        self.last_used = 0.0

    async def exchange(self, request: bytes, take: Take | None) -> tuple[int, bytes]:
        """Sends a request and waits for the end of its answer."""
        self._take = take
        self._parser = httptools.HttpResponseParser(self)
        self._begun = self._framed = self._complete = self.reusable = False
        self._pieces: list[bytes] = []
        self._waiting = asyncio.get_running_loop().create_future()
        if self._transport is None:
            raise RequestFailedError(
                "connection closed by the server", "before the request was sent"
            )
        self._transport.write(request)
        return await self._waiting

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ---- the event loop's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(
            asyncio.Transport, transport
        )  # uvloop's have no common base with asyncio's
        self._everyone.add(self)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if self._waiting is None or self._waiting.done():
            self.close()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
            if self._pieces and self._streams:
                pieces, self._pieces = self._pieces, []
                assert self._take is not None
                self._take(pieces[0] if len(pieces) == 1 else b"".join(pieces), now)
        except httptools.HttpParserError as error:
            self._fail(RequestFailedError("unreadable answer", str(error)))
        except Exception as error:
            self._fail(error)
        else:
            if self._complete:
                self.reusable = self._keep_alive
                self.last_used = now
                self._succeed()

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._transport = None
        self._everyone.discard(self)
        if self._waiting is None or self._waiting.done():
            return
        if not self._begun:
            self._fail(
                RequestFailedError(
                    "connection closed by the server", str(error or "before it answered")
                )
            )
        elif self._framed:
            self._fail(
                RequestFailedError("answer broken off", str(error or "the connection was closed"))
            )
        else:
            self._succeed()  # an answer without a length ends with the connection

    # ---- the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._framed = True

    def on_headers_complete(self) -> None:
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._keep_alive = self._parser.should_keep_alive()

    # ---- the end of an exchange

    @property
    def _streams(self) -> bool:
        return self._take is not None and self._parser.get_status_code() == 200

    def _succeed(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result((self._parser.get_status_code(), b"".join(self._pieces)))

    def _fail(self, error: Exception) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
        self.close()
