"""Asks one question and shows its answer.

One task reads the answer, another draws it. Ctrl-C cancels the reader, which closes the connection
and so ends the request on the server."""

import asyncio
from typing import Any

from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.answers.client import ChatClient
from toolkit.chat.answers.thinking import ThinkTagSplitter
from toolkit.chat.screen.display import Display
from toolkit.chat.screen.signals import Signals
from toolkit.client.wire import ServerError

CONTEXT_CODES = ("context_length_exceeded", "exceed_context_size_error")  # OpenAI's, llama.cpp's


async def exchange(
    client: ChatClient, body: dict[str, Any], display: Display, signals: Signals
) -> Answer:
    """Send a request and show its answer. A stop or an error is recorded in the answer."""
    answer = Answer()
    reader = asyncio.create_task(_read(client, body, answer, display))
    drawer = asyncio.create_task(_draw(display))

    try:
        with signals.handle(stop=reader.cancel, redraw=display.redraw):
            await asyncio.wait({reader, drawer}, return_when=asyncio.FIRST_COMPLETED)
            drawer.cancel()
            if drawer.done() and not drawer.cancelled():
                drawer.result()  # raises: the drawer ends only by an error
            answer.is_stopped = reader.cancelled()
            try:
                if not answer.is_stopped:
                    reader.result()
            except ServerError as error:
                answer.error = error.message
                answer.exceeds_context = error.code in CONTEXT_CODES
            display.finish()
    finally:
        reader.cancel()
        drawer.cancel()
        await asyncio.gather(reader, drawer, return_exceptions=True)
    return answer


async def _read(client: ChatClient, body: dict[str, Any], answer: Answer, display: Display) -> None:
    splitter = ThinkTagSplitter()
    try:
        async for delta in client.ask(body):
            answer.add(splitter.split(delta))
            display.update(answer)
    finally:
        answer.add(splitter.flush())
        display.update(answer)


async def _draw(display: Display) -> None:
    while True:
        await asyncio.sleep(display.refresh())
