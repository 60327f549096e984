"""Recordings: JSON lines. The first is a header, each other one a reading."""

from pathlib import Path
from typing import IO

import msgspec

from toolkit.errors import ToolkitError
from toolkit.top.readings.reading import Reading

VERSION = 1


class Header(msgspec.Struct, tag_field="format", tag="tk-top"):
    version: int
    urls: list[str]


class _Origin(msgspec.Struct):
    """URL of a reading: enough to skip the readings of other servers."""

    url: str


class RecordingWriter:
    """Writes a recording. Raises ToolkitError if the file cannot be written."""

    def __init__(self, path: str, urls: list[str]) -> None:
        self._path = path
        try:
            self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise ToolkitError(f"--record cannot write {path}: {error.strerror}.") from None
        self._write(msgspec.json.encode(Header(VERSION, urls)))

    def add(self, reading: Reading) -> None:
        self._write(msgspec.json.encode(reading))

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise ToolkitError(f"--record cannot write {self._path}: {error.strerror}.") from None


class RecordedSource:
    """One server of a recording.

    `read` returns its next reading, None after the last. One line of the file is in memory."""

    def __init__(self, path: str, url: str) -> None:
        self.url = url
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by `close`
        self._file.readline()
        self._now = 0.0
        self._decoder = msgspec.json.Decoder(Reading)
        self._origin = msgspec.json.Decoder(_Origin)

    def now(self) -> float:
        """Return the time of the last reading."""
        return self._now

    async def read(self, *, requests: bool) -> Reading | None:
        for line in self._file:
            try:
                if self._origin.decode(line).url == self.url:
                    reading = self._decoder.decode(line)
                    self._now = reading.time
                    return reading
            except msgspec.MsgspecError:
                continue  # cut off when the recording was interrupted
        return None

    async def abort(self, id: str) -> None:
        raise ToolkitError("This is a recording: its requests cannot be ended.")

    async def close(self) -> None:
        self._file.close()


def recorded_sources(path: str) -> list[RecordedSource]:
    """Open the servers of a recording. Raises ToolkitError if the file is not a recording."""
    try:
        with Path(path).open("rb") as file:
            header = msgspec.json.decode(file.readline(), type=Header)
    except OSError as error:
        raise ToolkitError(f"--replay cannot read {path}: {error.strerror}.") from None
    except msgspec.MsgspecError:
        raise ToolkitError(
            f"{path} is not a recording of tk top: its first line is not a header. "
            "'tk top --record FILE' writes a recording."
        ) from None
    if header.version != VERSION:
        raise ToolkitError(
            f"{path} is a recording of version {header.version}; this tk reads version {VERSION}."
        )
    return [RecordedSource(path, url) for url in header.urls]
