"""Forms with a file: bodies of multipart/form-data, whose file is on disk if it is large."""

from __future__ import annotations

import asyncio
import mmap
import tempfile
from dataclasses import dataclass, field
from typing import BinaryIO, Self

from starlette.requests import Request

from toolkit.api.http.layers.limits import BodyTooLargeError, IncomingBody
from toolkit.api.http.multipart import MultipartParser, PartEnd, PartHead
from toolkit.api.http.streaming import ClientDisconnectedError
from toolkit.errors import InvalidParamError, InvalidRequestError, ServerUnavailableError

FILE = "file"  # field of the file
MAX_FIELD = 64 * 2**10  # bytes of a field's value
MAX_OTHERS = 2**20  # bytes of the body without the file
IN_MEMORY = 2**20  # bytes of a file beyond which it is on disk: 30 seconds of 16 kHz fit
FORM_TIMEOUT = 600.0  # seconds to receive a form
_MAX_NAME = 100  # characters of a field's name in an error


@dataclass(frozen=True, slots=True)
class FormLimits:
    """Limits of a form."""

    max_bytes: int  # of the file
    flag: str = "--max-audio-mb"  # the setting that limits them


@dataclass(frozen=True, slots=True)
class UploadedFile:
    """A file of a form. `data` of a large one are on disk, until `data` is closed or garbage."""

    name: str  # as the client gave it: for messages alone
    data: bytes | mmap.mmap

    @property
    def size(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class Form:
    """Fields in the order of the body, and the file."""

    file: UploadedFile
    fields: dict[str, list[str]] = field(default_factory=dict)


async def read_form(request: Request, limits: FormLimits) -> Form:
    """Receive a body of multipart/form-data with one file.

    Raises InvalidRequestError, BodyTooLargeError, BodiesTooLargeError, BodyTimeoutError,
    ServerUnavailableError if the disk is full, and ClientDisconnectedError."""
    body: IncomingBody = request.scope["state"]["body"]
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length[:20]) > limits.max_bytes + MAX_OTHERS:
        raise too_large(limits)
    parser = MultipartParser(request.headers.get("content-type", "").encode("latin-1"))
    with _FormReader(limits, body) as reader:
        async with body.arriving(FORM_TIMEOUT):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ClientDisconnectedError
                for part in parser.feed(message.get("body", b"")):
                    await reader.take(part)
                more = message.get("more_body", False)
        parser.finish()
        return await reader.form()


class _FormReader:
    """Makes a form of its parts."""

    def __init__(self, limits: FormLimits, body: IncomingBody) -> None:
        self._limits = limits
        self._fields: dict[str, list[str]] = {}
        self._head = PartHead("", None)  # of the part that is read now
        self._value = bytearray()  # of a field
        self._num_others = 0  # bytes of all fields
        self._upload = _Upload(body)
        self._filename: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._upload.close()

    async def take(self, part: PartHead | bytes | PartEnd) -> None:
        """Take the next part of the body. Raises the errors of `read_form`."""
        if isinstance(part, PartHead):
            self._begin(part)
        elif isinstance(part, PartEnd):
            if self._head.name != FILE:
                self._end_field()
        elif self._head.name == FILE:
            if self._upload.size + len(part) > self._limits.max_bytes:
                raise too_large(self._limits)
            await self._upload.write(part)
        else:
            self._extend_field(part)

    async def form(self) -> Form:
        """Return the form, after the last part."""
        if self._filename is None:
            raise InvalidRequestError(f"{FILE} is missing.", param=FILE)
        return Form(UploadedFile(self._filename, await self._upload.data()), self._fields)

    def _begin(self, head: PartHead) -> None:
        self._head = head
        if head.name != FILE:
            return
        if self._filename is not None:
            raise InvalidParamError(FILE, "is in the form twice; one file is transcribed at a time")
        self._filename = head.filename or ""

    def _extend_field(self, data: bytes) -> None:
        self._value += data
        self._num_others += len(data)
        if len(self._value) <= MAX_FIELD and self._num_others <= MAX_OTHERS:
            return
        name = self._head.name[:_MAX_NAME]
        if self._head.filename is not None:
            raise InvalidParamError(name, f"is a file; the file must be in the field {FILE!r}")
        if len(self._value) > MAX_FIELD:
            raise InvalidParamError(name, f"has more than {MAX_FIELD:,} bytes")
        raise InvalidRequestError(f"The form has more than {MAX_OTHERS:,} bytes without its file.")

    def _end_field(self) -> None:
        try:
            value = self._value.decode()
        except UnicodeDecodeError as error:
            wrong = f"0x{self._value[error.start]:02x} at byte {error.start + 1}"
            raise InvalidParamError(
                self._head.name[:_MAX_NAME], f"is not valid UTF-8: {wrong}"
            ) from None
        self._fields.setdefault(self._head.name, []).append(value)
        self._value.clear()


class _Upload:
    """A file that arrives: in memory, then on disk."""

    def __init__(self, body: IncomingBody) -> None:
        self._body = body
        self._pending = bytearray()  # in memory, all or not yet written
        self._file: BinaryIO | None = None
        self.size = 0

    async def write(self, data: bytes) -> None:
        self._pending += data
        self.size += len(data)
        if len(self._pending) > IN_MEMORY:
            await self._flush()
        self._body.hold(len(self._pending))

    async def data(self) -> bytes | mmap.mmap:
        """Return all that was written."""
        if self._file is None:
            return bytes(self._pending)
        await self._flush()
        return mmap.mmap(self._file.fileno(), self.size, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Close the file. What `data` returned stays."""
        if self._file is not None:
            self._file.close()

    async def _flush(self) -> None:
        """Move what is in memory to the disk."""
        try:
            await asyncio.to_thread(self._append, self._pending)
        except OSError as error:
            raise ServerUnavailableError(
                f"The file cannot be stored in {tempfile.gettempdir()}: {error.strerror}."
            ) from None
        self._pending = bytearray()

    def _append(self, data: bytearray) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed by `close`)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def too_large(limits: FormLimits) -> BodyTooLargeError:
    """Return the error for a file beyond the limit."""
    most = limits.max_bytes // 2**20
    return BodyTooLargeError(
        f"{FILE} is larger than {most} MiB, which is the server's limit ({limits.flag}).",
        param=FILE,
    )
