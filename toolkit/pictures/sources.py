"""Pictures as they come: URLs of requests, and Pillow's images."""

from __future__ import annotations

import asyncio
import hashlib
import re
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

from toolkit.errors import InvalidParamError, ServerUnavailableError
from toolkit.pictures.addresses import PUBLIC, NetworkPolicy
from toolkit.pictures.local_files import read_below
from toolkit.pictures.settings import PictureLimits

MAX_URL = 8192  # characters, of URLs without data
_MAX_HEADER = 1024  # characters of a data URL in front of the comma
_INLINE = 2**20  # bytes that are hashed without a thread
_SHOWN = 60  # characters of a URL in a message
_ALLOWED = "a data: URL with base64, an http(s): URL or a file: URL"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Encoded:
    """A picture as it came.

    data: bytes of a file, base64 text of a data URL, or raw RGB of a Pillow image.
    digest: 16 bytes of SHA-256 of what it is.
    raw_size: (width, height) if `data` are raw RGB pixels."""

    data: bytes | str
    digest: bytes
    raw_size: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DataUrl:
    base64: str


@dataclass(frozen=True, slots=True)
class HttpUrl:
    url: str


@dataclass(frozen=True, slots=True)
class FileUrl:
    path: str


def parse_url(url: str, param: str) -> DataUrl | HttpUrl | FileUrl:
    """Return the kind of a URL and its parts. Raises InvalidRequestError for other URLs."""
    scheme = url[: url.find(":", 0, _MAX_HEADER) + 1].lower().removesuffix(":")
    if scheme == "data":
        return _parse_data_url(url, param)
    if scheme not in ("http", "https", "file"):
        raise InvalidParamError(param, f"must be {_ALLOWED}, not {_shown(url)}")
    if len(url) > MAX_URL:
        raise InvalidParamError(param, f"has {len(url)} characters; at most {MAX_URL} are allowed")
    if scheme != "file":
        return HttpUrl(url)
    try:
        parts = urlsplit(url)
    except ValueError:
        raise InvalidParamError(param, f"is not a valid URL: {_shown(url)}") from None
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidParamError(
            param, f"must have the form file:///absolute/path, unlike {_shown(url)}"
        )
    return FileUrl(unquote(parts.path, errors="surrogateescape"))


async def load(
    url: str, limits: PictureLimits, param: str, policy: NetworkPolicy = PUBLIC
) -> Encoded:
    """Return the picture of a URL, and count its bytes until it is garbage.

    `policy` is for tests. Raises InvalidRequestError, and ServerUnavailableError beyond
    `bytes_in_flight`."""
    parsed = parse_url(url, param)
    with _Hold(limits) as hold:
        data: bytes | str
        if isinstance(parsed, DataUrl):
            data = parsed.base64
            if len(data) > limits.max_bytes * 2:  # escapes and spaces included
                raise InvalidParamError(
                    param,
                    f"has {len(data):,} characters of base64; at most {limits.max_bytes:,} bytes "
                    "are allowed",
                )
            hold.add(len(data))
        elif isinstance(parsed, HttpUrl):
            from toolkit.pictures.fetch import fetch  # imports httpx

            data = await fetch(parsed.url, limits, param, hold.add, policy)
        else:
            data = await asyncio.to_thread(read_below, parsed.path, limits, param, hold.add)
        return hold.keep(await _encode(data))


def from_image(image: Any) -> Encoded:
    """Return the pixels of a Pillow image, upright and in RGB."""
    from toolkit.pictures.decoding import to_rgb, to_upright

    image.load()
    image = to_rgb(to_upright(image))
    data = image.tobytes()
    size = image.size
    return Encoded(data, _digest(data, b"RGB %d %d" % size), size)


class _Hold:
    """Bytes of one picture that the process holds, a part of `bytes_in_flight`."""

    _lock = threading.Lock()
    _total = 0
    _released: ClassVar[deque[int]] = deque()
    """Bytes of pictures that are garbage: their finalizers run anywhere, also inside the lock."""

    def __init__(self, limits: PictureLimits) -> None:
        self._most = limits.bytes_in_flight
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._released.append(self._count)

    def add(self, count: int) -> None:
        """Count bytes. Raises ServerUnavailableError if there are too many."""
        with _Hold._lock:
            while self._released:
                _Hold._total -= self._released.popleft()
            if _Hold._total + count > self._most:
                raise ServerUnavailableError(
                    f"Pictures of all requests have {_Hold._total:,} bytes; this one's next "
                    f"{count:,} would exceed the {self._most:,} that this server holds."
                )
            _Hold._total += count
        self._count += count

    def keep(self, encoded: Encoded) -> Encoded:
        """Hold the bytes as long as the picture exists."""
        weakref.finalize(encoded, self._released.append, self._count).atexit = False
        return encoded


def _parse_data_url(url: str, param: str) -> DataUrl:
    head, comma, _ = url[:_MAX_HEADER].partition(",")
    if not comma:
        raise InvalidParamError(param, f"is a data URL without a comma: {_shown(url)}")
    if not re.search(r";\s*base64\s*\Z", head, re.IGNORECASE):
        raise InvalidParamError(
            param,
            f"is a data URL without base64: its beginning is {_shown(head + comma)}, and must be "
            "like data:image/png;base64,",
        )
    return DataUrl(url[len(head) + 1 :])


async def _encode(data: bytes | str) -> Encoded:
    if len(data) <= _INLINE:
        return Encoded(data, _digest(data))
    return Encoded(data, await asyncio.to_thread(_digest, data))


def _digest(data: bytes | str, more: bytes = b"") -> bytes:
    """Return the same bytes for equal data of the same kind."""
    kind = b"base64" if isinstance(data, str) else b"rgb" if more else b"file"
    if isinstance(data, str):
        data = data.encode(errors="surrogatepass")
    made = hashlib.sha256(b"%s %s " % (kind, more))
    made.update(data)  # twice as fast as BLAKE2b where the processor has instructions for it
    return made.digest()[:16]


def _shown(url: str) -> str:
    return repr(url if len(url) <= _SHOWN else url[: _SHOWN - 3] + "...")
