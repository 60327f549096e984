"""One question from the command line or a pipe. Only the answer goes to stdout."""

from dataclasses import dataclass
from typing import Any

import orjson

from toolkit.chat.answers.answer_view import Answer
from toolkit.chat.screen.display import Display, NoDisplay, display_for
from toolkit.chat.session import Session
from toolkit.client.wire import ServerError
from toolkit.logs import escape_json

INCOMPLETE = 1  # exit codes
STOPPED = 130


@dataclass(frozen=True, slots=True)
class Question:
    """A question: the prompt of the command line, and piped text."""

    prompt: str
    piped: str


async def answer_once(session: Session, question: Question, *, is_continued: bool) -> int:
    """Ask the question, write the answer and return the exit code.

    `is_continued`: add both to the saved conversation. Raises ServerError if no answer begins, and
    InvalidRequestError if the question is an image alone and the model accepts none."""
    # Piped text may come from anyone: its paths are no reason to read files.
    prompt = await session.attach_images_in(question.prompt)
    session.terminal.note(session.images_title)
    text = "\n\n".join(filter(None, (prompt, question.piped)))
    new = [session.take_question(text)]
    answer = await session.exchange(new, _make_display(session))
    if answer.error is not None and answer.is_empty:
        raise ServerError(answer.error + session.config.word_hint)
    _write_summary(session, answer)
    if is_continued and not answer.is_empty:
        session.conversation.append(new, answer.message)
        session.save()
    return _exit_code(session, answer)


def _make_display(session: Session) -> Display:
    if session.config.json:
        return NoDisplay()
    return display_for(
        session.terminal, session.config.reasoning, "json" if session.config.schema else None
    )


def _write_summary(session: Session, answer: Answer) -> None:
    """Write the answer as JSON for --json; on a terminal, its stats."""
    terminal = session.terminal
    if session.config.json:
        document = orjson.dumps(to_json(session, answer), option=orjson.OPT_INDENT_2).decode()
        terminal.write(escape_json(document) + "\n")
    elif terminal.is_live:
        terminal.note(answer.stats(session.model.max_context))


def to_json(session: Session, answer: Answer) -> dict[str, Any]:
    """Return the output of --json. Times are in seconds."""
    return {
        "model": session.model.name,
        "content": answer.content,
        "reasoning": answer.reasoning or None,
        "tool_calls": answer.tool_calls,
        "finish_reason": "stopped" if answer.is_stopped else answer.finish_reason,
        "error": answer.error,
        "usage": {
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
            "completion_tokens": answer.usage.completion_tokens,
        },
        "time_to_first_token": answer.first_token,
        "time": answer.last_token,
        "tokens_per_second": answer.tokens_per_second,
    }


def _exit_code(session: Session, answer: Answer) -> int:
    if answer.is_stopped:
        return STOPPED
    if answer.error is not None:
        session.terminal.error(answer.error)
        return INCOMPLETE
    if session.config.schema is not None and answer.finish_reason == "length":
        session.terminal.error(
            "The answer was cut at its token limit, so it does not match the schema."
        )
        return INCOMPLETE
    return 0
