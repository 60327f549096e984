"""Recordings: a first line that says what it is, then a line of JSON for each reading."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import msgspec

from toolkit.errors import ToolkitError
from toolkit.top.readings.reading import Reading

VERSION = 1


class Head(msgspec.Struct, tag_field="format", tag="tk-top"):
    """The first line."""

    version: int
    urls: list[str]


class _Origin(msgspec.Struct):
    """Of a reading, whose it is: enough to pass over those of others."""

    url: str


class Recorder:
    """Writes a recording. Raises ToolkitError when the file cannot be written."""

    def __init__(self, path: str, urls: list[str]) -> None:
        self._path = path
        try:
            self._file: IO[bytes] = Path(path).open("wb")  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise ToolkitError(f"--record cannot write {path}: {error.strerror}.") from None
        self._write(msgspec.json.encode(Head(VERSION, urls)))

    def add(self, reading: Reading) -> None:
        """Writes a reading."""
        self._write(msgspec.json.encode(reading))

    def close(self) -> None:
        """Ends the recording."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        try:
            self._file.write(line + b"\n")
            self._file.flush()
        except OSError as error:
            raise ToolkitError(f"--record cannot write {self._path}: {error.strerror}.") from None


class Replay:
    """One server of a recording; each `read` gives its next reading, None after the last. A file of any length takes no
    more memory than one line of it.
    """

    def __init__(self, path: str, url: str) -> None:
        self.url = url
        self._file = Path(path).open("rb")  # noqa: SIM115  # closed by `close`
        self._file.readline()
        self._now = 0.0
        self._decoder = msgspec.json.Decoder(Reading)
        self._origin = msgspec.json.Decoder(_Origin)

    def now(self) -> float:
        """The clock stands still between two readings."""
        return self._now

    async def read(self, *, requests: bool) -> Reading | None:
        """See Source."""
        for line in self._file:
            try:
                if self._origin.decode(line).url == self.url:
                    reading = self._decoder.decode(line)
                    self._now = reading.time
                    return reading
            except msgspec.MsgspecError:
                continue  # cut short, where the recording was interrupted
        return None

    async def abort(self, id: str) -> None:
        """See Source."""
        raise ToolkitError("This is a recording: its requests are gone.")

    async def close(self) -> None:
        """See Source."""
        self._file.close()


def replays(path: str) -> list[Replay]:
    """The servers of a recording. Raises ToolkitError when the file cannot be read or is none."""
    try:
        with Path(path).open("rb") as file:
            head = msgspec.json.decode(file.readline(), type=Head)
    except OSError as error:
        raise ToolkitError(f"--replay cannot read {path}: {error.strerror}.") from None
    except msgspec.MsgspecError:
        raise ToolkitError(
            f"{path} is no recording of tk top: its first line is not that of one. 'tk top --record FILE' makes them."
        ) from None
    if head.version != VERSION:
        raise ToolkitError(
            f"{path} is a recording of version {head.version}; this tk reads version {VERSION}."
        )
    return [Replay(path, url) for url in head.urls]
