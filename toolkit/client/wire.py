"""Parsing of an OpenAI-compatible server's output: server-sent events and error bodies."""

from typing import Any
from urllib.parse import urlsplit

import orjson

from toolkit.errors import ToolkitError

DONE = b"[DONE]"


class ServerError(ToolkitError):
    """The server cannot be reached or refused the request."""

    status = 502
    type = "server_error"


class KeyRejectedError(ServerError):
    """The server refuses the key, or that there is none."""


class RequestFailedError(Exception):
    """A request got no complete answer. `cause` is the kind of failure, `example` its message."""

    def __init__(self, cause: str, example: str) -> None:
        super().__init__(cause, example)
        self.cause = cause
        self.example = example


class EventBuffer:
    """Splits the bytes of an event stream into events."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that these bytes complete, without comments."""
        data = self._rest + data if self._rest else data
        if b"\r" in data:
            tail = b"\r" if data.endswith(b"\r") else b""  # its \n may be in the next chunk
            data = data.removesuffix(b"\r").replace(b"\r\n", b"\n") + tail
        *events, self._rest = data.split(b"\n\n")
        return [found for event in events if (found := _data(event)) is not None]


def _data(event: bytes) -> bytes | None:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = [
        line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None


def error_message(body: bytes) -> str:
    """Return the message of an error body of any format: one line, at most 500 characters."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        found = body.decode(errors="replace")
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    text = found if isinstance(found, str) else orjson.dumps(found).decode()
    return " ".join(text.split())[:500] or "the server gave no reason"


def error_code(body: bytes) -> str | None:
    """Return the code of an error body in OpenAI's format, or its type if that is no code."""
    try:
        found: Any = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = found.get("error") if isinstance(found, dict) else None
    codes = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    return next((code for code in codes if isinstance(code, str)), None)


def goes_through_proxy(url: str) -> bool:
    """Return True if HTTP_PROXY and the like apply to this address: not if it is local."""
    return urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1")
