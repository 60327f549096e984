"""One question and its answer: a task reads, another one draws, and Ctrl-C cancels the first."""

from __future__ import annotations

import asyncio
from typing import Any

from toolkit.chat.answer_view import Answer
from toolkit.chat.client import ChatClient
from toolkit.chat.screen.display import Display
from toolkit.chat.screen.signals import Signals
from toolkit.chat.thinking import ThinkTags
from toolkit.client.wire import ServerError


async def exchange(
    client: ChatClient, body: dict[str, Any], display: Display, signals: Signals
) -> Answer:
    """Asks, and shows what comes. The answer says whether Ctrl-C stopped it, and what else broke it off."""
    answer = Answer()
    reader = asyncio.create_task(_read(client, body, answer, display))
    drawer = asyncio.create_task(_draw(display))

    try:
        with signals.during(stop=reader.cancel, redraw=display.redraw):
            await asyncio.wait({reader, drawer}, return_when=asyncio.FIRST_COMPLETED)
            drawer.cancel()
            if drawer.done() and not drawer.cancelled():
                drawer.result()  # it ends by an error alone
            answer.stopped = reader.cancelled()
            try:
                if not answer.stopped:
                    reader.result()
            except ServerError as error:
                answer.error = error.message
            display.finish()
    finally:
        reader.cancel()
        drawer.cancel()
        await asyncio.gather(reader, drawer, return_exceptions=True)
    return answer


async def _read(client: ChatClient, body: dict[str, Any], answer: Answer, display: Display) -> None:
    tags = ThinkTags()
    try:
        async for delta in client.ask(body):
            answer.add(tags.split(delta))
            display.update(answer)
    finally:
        answer.add(tags.rest())
        display.update(answer)


async def _draw(display: Display) -> None:
    while True:
        await asyncio.sleep(display.refresh())
