"""The bytes of a stream, and its end if the client disconnects before it starts."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from toolkit.api.http.streaming import SERVER_SEND, TEXT_SLOT, EventStream, EventTemplate, event
from toolkit.api.openai.replies import (
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    Completion,
    CompletionChoice,
)

TEXTS = (
    "",
    " word",
    '"',
    "\\",
    "\n\t",
    "\x00",
    "\x1f",
    "é日本🙂",
    "</script>",
    "\u2028",
    '","text":"',
    TEXT_SLOT,
)
HEAD = {"id": "cmpl-1", "created": 1, "model": 'a "model"', "system_fingerprint": "fp_1"}


@pytest.mark.parametrize("usage", [None, msgspec.UNSET])
@pytest.mark.parametrize("text", TEXTS)
def test_a_template_s_event_equals_the_encoded_event(text: str, usage: object) -> None:
    def completion(text: str) -> Completion:
        return Completion(
            **HEAD, object="text_completion", choices=[CompletionChoice(3, text)], usage=usage
        )

    def chunk(text: str) -> ChatChunk:
        choice = ChatChunkChoice(3, ChatDelta(content=text))
        return ChatChunk(**HEAD, object="chat.completion.chunk", choices=[choice], usage=usage)

    for make in (completion, chunk):
        assert EventTemplate(make(TEXT_SLOT)).event(text) == event(make(text))


async def test_the_body_bypasses_the_layers_of_the_application() -> None:
    between, server = [], []

    async def events():
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async def through_layers(message: dict[str, object]) -> None:
        between.append(message["type"])

    async def to_server(message: dict[str, object]) -> None:
        server.append((message["body"], message["more_body"]))

    async def receive() -> dict[str, str]:
        await asyncio.Event().wait()
        return {}

    stream = EventStream(events(), lambda: None)
    await stream({"type": "http", SERVER_SEND: to_server}, receive, through_layers)
    assert between == ["http.response.start"]
    assert server == [(b"data: 1\n\n", True), (b"data: 2\n\n", True), (b"", False)]


@pytest.mark.parametrize("how", ["the client disconnects", "the connection breaks"])
async def test_a_stream_that_never_started_ends_its_request(how: str) -> None:
    """A generator that never started does not run its `finally`."""
    started, ended = [], []

    async def events():
        started.append(True)
        yield b"data: {}\n\n"

    async def receive() -> dict[str, str]:
        if how == "the connection breaks":
            await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        if how == "the connection breaks":
            raise ConnectionResetError
        await asyncio.Event().wait()

    async with asyncio.timeout(10):
        await EventStream(events(), lambda: ended.append(True))({"type": "http"}, receive, send)
    assert ended == [True]
    assert not started
