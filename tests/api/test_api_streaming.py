"""The end of a stream whose client has gone before it began."""

from __future__ import annotations

import asyncio

import pytest

from toolkit.api.streaming import EventStream


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
