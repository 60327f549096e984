"""What a stream puts on the wire, and its end when its client has gone before it began."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from toolkit.api.http.streaming import HOLE, SERVER_SEND, EventStream, EventTemplate, event
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
    HOLE,
)
HEAD = {"id": "cmpl-1", "created": 1, "model": 'a "model"'}


@pytest.mark.parametrize("usage", [None, msgspec.UNSET])
@pytest.mark.parametrize("text", TEXTS)
def test_an_event_from_a_template_is_the_event_to_the_byte(text: str, usage: object) -> None:
    def completion(text: str) -> Completion:
        return Completion(
            **HEAD, object="text_completion", choices=[CompletionChoice(3, text)], usage=usage
        )

    def chunk(text: str) -> ChatChunk:
        choice = ChatChunkChoice(3, ChatDelta(content=text))
        return ChatChunk(**HEAD, object="chat.completion.chunk", choices=[choice], usage=usage)

    for make in (completion, chunk):
        assert EventTemplate(make(HOLE)).event(text) == event(make(text))


async def test_the_body_goes_to_the_server_past_the_layers_between() -> None:
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


@pytest.mark.parametrize("how", ["the client goes", "the connection breaks"])
async def test_a_stream_that_was_never_begun_ends_its_request_too(how: str) -> None:
    """A generator that was never started runs no `finally` of its own."""
    begun, ended = [], []

    async def events():
        begun.append(True)
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
    assert not begun
