"""Multipart bodies, split into parts as their bytes arrive (RFC 7578; RFC 2046, section 5.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

from toolkit.errors import InvalidParamError, InvalidRequestError

MAX_PARTS = 64
MAX_HEAD = 8 * 2**10  # bytes of a part's headers
_MAX_PADDING = 64  # spaces after a boundary
_MAX_NAME = 100  # characters of a name in an error
_MAX_BOUNDARY = 200  # characters; RFC 2046 allows 70
_NEWLINE = b"\r\n"
_PARAMETER = re.compile(rb';[ \t]*([^\s=;"]+)[ \t]*=[ \t]*("(?:[^"\\]|\\.)*"|[^\s;"]*)[ \t]*')
_BOUNDARY = re.compile(rb"[ -~]*[!-~]")
_PLAIN = {b"", b"7bit", b"8bit", b"binary"}
"""Transfer encodings that change nothing."""


@dataclass(frozen=True, slots=True)
class PartHead:
    """Beginning of a part. Its data follow, then a PartEnd."""

    name: str
    filename: str | None  # None: a field


@dataclass(frozen=True, slots=True)
class PartEnd:
    """End of a part."""


class _State(Enum):
    START = auto()  # before the first boundary
    BOUNDARY = auto()  # directly after a boundary
    HEAD = auto()
    DATA = auto()
    END = auto()  # after the last boundary


class MultipartParser:
    """Splits a body into parts. Holds at most MAX_HEAD bytes and a chunk."""

    def __init__(self, content_type: bytes) -> None:
        """`content_type`: the request's header. Raises InvalidRequestError."""
        self._boundary = _NEWLINE + b"--" + _find_boundary(content_type)
        self._buffer = bytearray(_NEWLINE)  # a boundary begins with that of the line before
        self._state = _State.START
        self._num_parts = 0
        self._found: list[PartHead | bytes | PartEnd] = []
        self._steps = {
            _State.START: self._read_start,
            _State.BOUNDARY: self._read_padding,
            _State.HEAD: self._read_head,
            _State.DATA: self._read_data,
            _State.END: self._skip,
        }

    def feed(self, chunk: bytes) -> list[PartHead | bytes | PartEnd]:
        """Return what the next bytes of the body complete. Raises InvalidRequestError."""
        self._buffer += chunk
        while self._steps[self._state]():
            pass
        found, self._found = self._found, []
        return found

    def finish(self) -> None:
        """Check that the body is complete. Raises InvalidRequestError."""
        if self._state is not _State.END:
            raise InvalidRequestError(
                "The multipart body is truncated: it does not end with its boundary and --."
            )

    # Each step returns False if it needs more bytes.

    def _read_start(self) -> bool:
        while self._buffer.startswith(_NEWLINE * 2):  # empty lines
            del self._buffer[: len(_NEWLINE)]
        if self._buffer.startswith(self._boundary):
            del self._buffer[: len(self._boundary)]
            self._state = _State.BOUNDARY
            return True
        if not (self._boundary + _NEWLINE).startswith(self._buffer) and (
            self._buffer != _NEWLINE + b"\r"
        ):
            raise InvalidRequestError(
                "The multipart body does not begin with the boundary that Content-Type declares."
            )
        return False

    def _read_padding(self) -> bool:
        """Read the rest of a boundary's line."""
        if self._buffer.startswith(b"--"):
            self._state = _State.END
            return True
        end = self._buffer.find(_NEWLINE)
        line = bytes(self._buffer if end < 0 else self._buffer[:end])
        rest = line.lstrip(b" \t")
        if len(line) > _MAX_PADDING or (rest and (end >= 0 or rest not in (b"\r", b"-"))):
            raise InvalidRequestError(
                "The multipart body has a boundary that is not alone in its line."
            )
        if end < 0:
            return False
        del self._buffer[:end]  # the newline stays: two end a head, also one without headers
        self._state = _State.HEAD
        return True

    def _read_head(self) -> bool:
        end = self._buffer.find(_NEWLINE * 2, 0, MAX_HEAD)
        if end < 0:
            if len(self._buffer) < MAX_HEAD:
                return False
            raise InvalidRequestError(
                f"The multipart body has a part with more than {MAX_HEAD:,} bytes of headers."
            )
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise InvalidRequestError(f"The multipart body has more than {MAX_PARTS} parts.")
        self._found.append(_parse_head(bytes(self._buffer[:end])))
        del self._buffer[: end + 2 * len(_NEWLINE)]
        self._state = _State.DATA
        return True

    def _read_data(self) -> bool:
        """Read data up to the boundary, or up to the bytes that may be a part of one."""
        end = self._buffer.find(self._boundary)
        size = end if end >= 0 else max(0, len(self._buffer) - len(self._boundary) + 1)
        if size:
            self._found.append(bytes(self._buffer[:size]))
            del self._buffer[:size]
        if end < 0:
            return False
        del self._buffer[: len(self._boundary)]
        self._found.append(PartEnd())
        self._state = _State.BOUNDARY
        return True

    def _skip(self) -> bool:
        self._buffer.clear()  # text after the last boundary means nothing
        return False


def _find_boundary(content_type: bytes) -> bytes:
    kind, parameters = _parse(content_type)
    if kind != b"multipart/form-data":
        shown = content_type[:100].decode("latin-1")
        raise InvalidRequestError(
            f"The body must be multipart/form-data, with the sound in the field 'file'; its "
            f"Content-Type is {shown!r}."
        )
    boundary = parameters.get(b"boundary", b"")
    if not _BOUNDARY.fullmatch(boundary) or len(boundary) > _MAX_BOUNDARY:
        raise InvalidRequestError(
            "Content-Type is multipart/form-data without a valid boundary. Leave the header to the "
            "HTTP client, which makes one."
        )
    return boundary


def _parse_head(lines: bytes) -> PartHead:
    headers: dict[bytes, bytes] = {}
    for line in filter(None, lines.split(_NEWLINE)):
        header, colon, value = line.partition(b":")
        if not colon:
            raise InvalidRequestError(
                f"The multipart body has a header without a colon: {_shown(line)}."
            )
        headers[header.strip().lower()] = value.strip()
    kind, parameters = _parse(headers.get(b"content-disposition", b""))
    if kind != b"form-data" or b"name" not in parameters:
        raise InvalidRequestError(
            "The multipart body has a part without 'Content-Disposition: form-data; name=...'."
        )
    name = parameters[b"name"].decode(errors="replace")
    encoding = headers.get(b"content-transfer-encoding", b"").lower()
    if encoding not in _PLAIN:
        raise InvalidParamError(
            name[:_MAX_NAME],
            f"has the Content-Transfer-Encoding {_shown(encoding)}; send it as it is",
        )
    filename = parameters.get(b"filename", parameters.get(b"filename*"))
    return PartHead(name, None if filename is None else filename.decode(errors="replace"))


def _parse(value: bytes) -> tuple[bytes, dict[bytes, bytes]]:
    """Return (value in lower case, parameters) of a header such as `form-data; name="file"`."""
    kind = value.partition(b";")[0]
    found: dict[bytes, bytes] = {}
    place = len(kind)
    while (parameter := _PARAMETER.match(value, place)) is not None:
        name, text = parameter[1].lower(), parameter[2]
        if text.startswith(b'"'):
            text = re.sub(rb'\\(["\\])', rb"\1", text[1:-1])  # other backslashes are Windows'
        found.setdefault(name, text)
        place = parameter.end()
    return kind.strip().lower(), found


def _shown(text: bytes) -> str:
    return repr(text[:60])[1:]
