"""One question from the command line or a pipe, whose answer alone goes to stdout."""

from __future__ import annotations

from typing import Any

import orjson

from toolkit.chat.answer_view import Answer
from toolkit.chat.exchange import exchange
from toolkit.chat.request import request_body
from toolkit.chat.screen.display import Display, NoDisplay, display_for
from toolkit.chat.session import Session
from toolkit.client.wire import ServerError
from toolkit.config.clients import ChatConfig

BROKEN_OFF = 1
STOPPED = 130


async def answer_once(session: Session, question: str, *, is_continued: bool) -> int:
    """Asks and writes; the exit code. `is_continued`: it belongs to a saved conversation, and is kept there.

    Raises ServerError when no answer begins.
    """
    new = [{"role": "user", "content": question}]
    body = request_body(session.config, session.card.name, session.conversation.request(new))
    answer = await exchange(session.client, body, _display(session), session.signals)
    if answer.error is not None and answer.is_empty:
        raise ServerError(answer.error + _hint(session.config))
    _write_rest(session, answer)
    if is_continued and not answer.is_empty:
        session.conversation.keep(new, answer.message)
        session.save()
    return _exit_code(session, answer)


def _display(session: Session) -> Display:
    if session.config.json:
        return NoDisplay()
    return display_for(
        session.terminal, session.config.reasoning, "json" if session.config.schema else None
    )


def _write_rest(session: Session, answer: Answer) -> None:
    """What is not shown while it comes."""
    terminal = session.terminal
    if session.config.json:
        terminal.write(
            orjson.dumps(as_json(session, answer), option=orjson.OPT_INDENT_2).decode() + "\n"
        )
    elif terminal.is_live:
        terminal.note(answer.stats(session.card.max_context))


def _hint(config: ChatConfig) -> str:
    """For `tk chat word`, which asks a model of that name."""
    if config.model is None or config.prompt is not None:
        return ""
    return f" ({config.model} stands for a model here; a question of one word needs --prompt.)"


def as_json(session: Session, answer: Answer) -> dict[str, Any]:
    """What --json prints. Times are in seconds."""
    return {
        "model": session.card.name,
        "content": answer.content,
        "reasoning": answer.reasoning or None,
        "tool_calls": answer.tool_calls,
        "finish_reason": "stopped" if answer.stopped else answer.finish_reason,
        "error": answer.error,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": answer.usage.completion_tokens,
        },
        "time_to_first_token": answer.first,
        "time": answer.last,
        "tokens_per_second": answer.tokens_per_second,
    }


def _exit_code(session: Session, answer: Answer) -> int:
    if answer.stopped:
        return STOPPED
    if answer.error is not None:
        session.terminal.error(answer.error)
        return BROKEN_OFF
    if session.config.schema is not None and answer.finish_reason == "length":
        session.terminal.error(
            "The answer was cut at the most tokens that it may have, so it does not fit the schema."
        )
        return BROKEN_OFF
    return 0
