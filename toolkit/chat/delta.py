"""What a server sends of an answer: as the API has it, and as a piece."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from toolkit.client.wire import ServerError, error_message

MOST_CALLS = 256  # of tools in one answer


class FunctionPart(Struct):
    """A part of a call: the name at once, the arguments in pieces of JSON."""

    name: str | None = None
    arguments: str | None = None


class CallPart(Struct):
    """Which call of the answer it belongs to, and what it adds."""

    index: Annotated[int, Meta(ge=0, lt=MOST_CALLS)] | None = None
    id: str | None = None
    function: FunctionPart | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    """Tokens of a request and its answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class _Said(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[CallPart], Meta(max_length=MOST_CALLS)] | None = None


class _Choice(Struct):
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class Delta:
    """What one event brings, or a whole answer that was not streamed."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def is_token(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def read_delta(data: bytes) -> Delta:
    """The piece in one event, or in a whole response. Raises ServerError for an error in its place, or nonsense."""
    try:
        event = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(
            f"The server sent something unreadable ({error}): {data[:200]!r}"
        ) from None
    if event.error:
        raise ServerError(f"The server gave up on the answer: {error_message(data)}")
    choice = event.choices[0] if event.choices else _Choice()
    said = choice.delta or choice.message or _Said()
    return Delta(
        content=said.content or "",
        reasoning=said.reasoning_content or said.reasoning or "",
        calls=tuple(said.tool_calls or ()),
        finish_reason=choice.finish_reason,
        usage=event.usage,
    )
