"""Client of tk's transcriptions: sends a file, and reads its transcript as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, BinaryIO

import httpx
import msgspec

from toolkit.chat.answers.client import Address
from toolkit.client.wire import DONE, EventBuffer, ServerError, error_message
from toolkit.speech.formats import (
    TIMED_FORMATS,
    Format,
    TranscriptionSegment,
    to_srt,
    to_vtt,
)

EXTENSIONS: dict[Format, str] = {
    "json": "json",
    "srt": "srt",
    "text": "txt",
    "verbose_json": "json",
    "vtt": "vtt",
}
"""Endings of files, by format."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Fields of all requests."""

    model: str
    format: Format = "text"
    language: str | None = None
    prompt: str | None = None
    translate: bool = False
    fallback: bool | None = None

    @property
    def path(self) -> str:
        return f"/v1/audio/{'translations' if self.translate else 'transcriptions'}"

    @property
    def fields(self) -> dict[str, str]:
        given = {
            "model": self.model,
            "response_format": "verbose_json" if self.format in TIMED_FORMATS else "json",
            "language": self.language,
            "prompt": self.prompt,
            "temperature_fallback": None if self.fallback is None else str(self.fallback).lower(),
            "stream": "true",
            "stream_continuous_usage_stats": "true",
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a transcription. Seconds are those of the file."""

    text: str = ""  # what the text has grown by
    seconds: float | None = None  # transcribed so far; None: as before
    total_seconds: float | None = None
    done: dict[str, Any] | None = None  # the complete transcript, at the end


class TranscriptionClient:
    """Sends files to one server. Belongs to one event loop."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._http = address.async_client()

    async def close(self) -> None:
        await self._http.aclose()

    async def transcribe(
        self, file: BinaryIO, name: str, wishes: Wishes
    ) -> AsyncGenerator[Progress, None]:
        """Yield the progress of a file. Closing the generator ends the request.

        Raises ServerError if the server cannot be reached, refuses the file, or disconnects."""
        try:
            async with self._http.stream(
                "POST", wishes.path, data=wishes.fields, files={"file": (name, file)}
            ) as response:
                if response.status_code != 200:
                    raise self._refused(response.status_code, await response.aread())
                async with aclosing(_read(response)) as steps:
                    async for step in steps:
                        yield step
        except httpx.ConnectError as error:
            raise self.address.unreachable(error) from None
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerError(f"Lost the connection to {self.address.title} ({reason}).") from None

    def _refused(self, status: int, body: bytes) -> ServerError:
        if status in (401, 403, 404):
            return self.address.refused(status, body)
        return ServerError(error_message(body))


async def _read(response: httpx.Response) -> AsyncGenerator[Progress, None]:
    events = EventBuffer()
    async for data in response.aiter_bytes():
        for event in events.feed(data):
            if event == DONE:
                return
            yield _parse(event)
    raise ServerError("The server closed the connection before the end of the transcript.")


def _parse(event: bytes) -> Progress:
    found: dict[str, Any] = msgspec.json.decode(event)
    if "error" in found:
        raise ServerError(error_message(event))
    if found.get("type") == "transcript.text.done":
        return Progress(done=found)
    usage = found.get("usage") or {}
    return Progress(found.get("delta", ""), usage.get("seconds"), usage.get("total_seconds"))


def to_format(done: dict[str, Any], format: Format) -> str:
    """Return a complete transcript as text of a format, which ends with a newline."""
    if format == "text":
        return f"{done['text']}\n"
    if format in ("srt", "vtt"):
        segments = msgspec.convert(done["segments"], list[TranscriptionSegment])
        return (to_srt if format == "srt" else to_vtt)(segments)
    shown = {name: value for name, value in done.items() if name != "type"}
    return msgspec.json.encode(shown).decode() + "\n"
