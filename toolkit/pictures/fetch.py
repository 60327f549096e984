"""Downloads of pictures, which a client must not be able to aim at other services.

Only allowed domains are fetched. A name is resolved once, all its addresses must be public, and the
connection goes to the address that was checked. Proxies of the environment are not used."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ssl
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx

from toolkit.errors import ConfigError, InvalidParamError
from toolkit.logs import escape_line
from toolkit.pictures.addresses import PUBLIC, NetworkPolicy
from toolkit.pictures.settings import PictureLimits
from toolkit.version import __version__

MAX_REDIRECTS = 3
_REDIRECTS = {301, 302, 303, 307, 308}
_PORTS = {"http": 80, "https": 443}
_HEADERS = [
    (b"User-Agent", f"tk/{__version__}".encode()),
    (b"Accept", b"image/*"),
    (b"Accept-Encoding", b"identity"),
    (b"Connection", b"close"),
]


@dataclass(frozen=True, slots=True)
class Domain:
    """An entry of `allowed_domains`: `host`, `.host` or either with `:port`.

    `example.com` is that host alone. `.example.com` is every host below it, and not itself."""

    host: str
    is_suffix: bool
    port: int | None  # None: 80 and 443

    def has(self, url: httpx.URL) -> bool:
        host, port = _host(url), _port(url)
        is_here = host.endswith("." + self.host) if self.is_suffix else host == self.host
        ports = _PORTS.values() if self.port is None else (self.port,)
        return is_here and port in ports


@functools.lru_cache
def parse_domain(entry: str) -> Domain:
    """Parse an entry of `allowed_domains`. Raises ConfigError."""
    name = entry.strip().lower()
    try:
        url = httpx.URL(f"any://{name.removeprefix('.')}")
    except httpx.InvalidURL:
        url = httpx.URL("any:")
    if not url.host or url.path not in ("", "/") or url.userinfo or url.query or "*" in name:
        raise ConfigError(
            f"The allowed domain {entry!r} is not valid: an entry is like example.com, "
            ".example.com for all hosts below it, or example.com:8080."
        )
    return Domain(_host(url), name.startswith("."), url.port)


async def fetch(
    url: str,
    limits: PictureLimits,
    param: str,
    count: Callable[[int], None],
    policy: NetworkPolicy = PUBLIC,
) -> bytes:
    """Return the bytes behind an http(s) URL, also after redirects. `count` gets their numbers.

    Raises InvalidRequestError, and what `count` raises."""
    download = _Download(limits, param, count, policy)
    try:
        async with asyncio.timeout(limits.fetch_timeout):
            return await download.follow(url)
    except TimeoutError:
        raise InvalidParamError(
            param,
            f"could not be downloaded within {limits.fetch_timeout:g} seconds; "
            f"{download.num_bytes:,} bytes were received",
        ) from None


class _Download:
    def __init__(
        self,
        limits: PictureLimits,
        param: str,
        count: Callable[[int], None],
        policy: NetworkPolicy,
    ) -> None:
        self._limits, self._param, self._count, self._policy = limits, param, count, policy
        self._deadline = time.monotonic() + limits.fetch_timeout
        self.num_bytes = 0

    async def follow(self, text: str) -> bytes:
        url = self._parse(text)
        for _ in range(MAX_REDIRECTS + 1):
            self._check(url)
            found = await self._get(url)
            if isinstance(found, bytes):
                return found
            if url.scheme == "https" and found.scheme != "https":
                raise self._error("redirects from https to another scheme")
            url = found
        raise self._error(f"redirects more than {MAX_REDIRECTS} times")

    def _check(self, url: httpx.URL) -> None:
        if url.scheme not in _PORTS:
            raise self._error(f"redirects to the scheme {_shown(url.scheme)}, not http or https")
        if not self._limits.allowed_domains:
            raise self._error(
                "is an http(s) URL, and this server downloads none; send the picture in a data: URL"
            )
        if url.userinfo:
            raise self._error("must not have a user name or password")
        if not any(parse_domain(entry).has(url) for entry in self._limits.allowed_domains):
            raise self._error(
                f"has the host {_shown(_host(url))} and the port {_port(url)}, which are not among "
                "those that this server downloads pictures from"
            )

    async def _get(self, url: httpx.URL) -> bytes | httpx.URL:
        """Return the picture, or the URL of a redirect."""
        backend = _CheckedBackend(self._policy, self._param, self._deadline)
        target = httpcore.URL(
            scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path
        )
        headers = [(b"Host", url.netloc), *_HEADERS]
        context = self._policy.ssl_context or _ssl_context()
        try:
            async with (
                httpcore.AsyncConnectionPool(ssl_context=context, network_backend=backend) as pool,
                pool.stream("GET", target, headers=headers) as response,
            ):
                return await self._read(response, url)
        except (
            httpcore.NetworkError,
            httpcore.ProtocolError,
            httpcore.TimeoutException,
        ) as error:
            raise self._error(
                f"could not be downloaded: {_reason(error)} {_shown(_host(url))}, port {_port(url)}"
            ) from None

    async def _read(self, response: httpcore.Response, url: httpx.URL) -> bytes | httpx.URL:
        headers = {name.lower(): value for name, value in response.headers}
        if response.status in _REDIRECTS and b"location" in headers:
            return self._parse(headers[b"location"].decode("latin-1"), url)
        if response.status != 200:
            raise self._error(
                f"could not be downloaded: {_shown(_host(url))} answered with status "
                f"{response.status}"
            )
        if (encoding := headers.get(b"content-encoding", b"identity").lower()) != b"identity":
            raise self._error(
                f"came with the content encoding {_shown(encoding.decode('latin-1'))}"
            )
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limits.max_bytes:
            raise self._too_many(int(length))
        data = bytearray()
        async for chunk in response.aiter_stream():
            self._count(len(chunk))
            data += chunk
            self.num_bytes = len(data)
            if len(data) > self._limits.max_bytes:
                raise self._too_many(len(data), "more than ")
        return bytes(data)

    def _parse(self, text: str, base: httpx.URL | None = None) -> httpx.URL:
        try:
            return httpx.URL(text) if base is None else base.join(text)
        except (httpx.InvalidURL, ValueError):
            raise self._error(
                f"{'is' if base is None else 'redirects to'} not a valid URL: {_shown(text)}"
            ) from None

    def _too_many(self, count: int, more: str = "") -> InvalidParamError:
        most = self._limits.max_bytes
        return self._error(f"is a file of {more}{count:,} bytes; at most {most:,} are allowed")

    def _error(self, problem: str) -> InvalidParamError:
        return InvalidParamError(self._param, problem)


class _CheckedBackend(httpcore.AsyncNetworkBackend):
    """Connects to the addresses that it has checked."""

    def __init__(self, policy: NetworkPolicy, param: str, deadline: float) -> None:
        self._policy, self._param, self._deadline = policy, param, deadline
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Try the addresses of a name, each for its share of the time that is left."""
        addresses = await self._addresses(host, port)
        for position, address in enumerate(addresses):
            share = (self._deadline - time.monotonic()) / (len(addresses) - position)
            with contextlib.suppress(httpcore.ConnectError, httpcore.ConnectTimeout):
                return await self._inner.connect_tcp(address, port, max(share, 0.0))
        raise httpcore.ConnectError

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise httpcore.ConnectError("no sockets of this machine")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            addresses = await self._policy.resolve(host, port)
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise InvalidParamError(
                self._param, f"has the host {_shown(host)}, which has no address"
            )
        if not all(map(self._policy.is_allowed, addresses)):
            raise InvalidParamError(
                self._param, f"has the host {_shown(host)}, whose address is not public"
            )
        return addresses


@functools.cache
def _ssl_context() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


def _host(url: httpx.URL) -> str:
    return url.raw_host.decode("ascii").lower()


def _port(url: httpx.URL) -> int:
    return url.port or _PORTS.get(url.scheme, 0)


def _reason(error: Exception) -> str:
    """Return what went wrong with a host, whose name follows."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return "no valid certificate for"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
        return "no connection to"
    if isinstance(error, httpcore.ProtocolError):
        return "no valid HTTP answer from"
    return "a broken connection to"


def _shown(text: str) -> str:
    return repr(escape_line(text[:100]))
