"""Parts of a streamed answer, parsed from the API's JSON."""

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from toolkit.client.wire import ServerError, error_message

MAX_TOOL_CALLS = 256  # in one answer


class FunctionPart(Struct):
    """Part of a tool call: the whole name, or a piece of the JSON arguments."""

    name: str | None = None
    arguments: str | None = None


class CallPart(Struct):
    """Part of the tool call number `index` of the answer."""

    index: Annotated[int, Meta(ge=0, lt=MAX_TOOL_CALLS)] | None = None
    id: str | None = None
    function: FunctionPart | None = None


class PromptDetails(Struct):
    cached_tokens: int | None = None


class Usage(Struct):
    """Token counts of a request and its answer."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None


class _Message(Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[CallPart], Meta(max_length=MAX_TOOL_CALLS)] | None = None


class _Choice(Struct):
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """Content of one event, or of a complete answer that was not streamed."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def has_token(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


def parse_delta(data: bytes) -> ChatDelta:
    """Parse an event or a complete response. Raises ServerError if it is an error or invalid."""
    try:
        event = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise ServerError(f"The server sent invalid data ({error}): {data[:200]!r}") from None
    if event.error:
        raise ServerError(f"The server failed during the answer: {error_message(data)}")
    choice = event.choices[0] if event.choices else _Choice()
    message = choice.delta or choice.message or _Message()
    return ChatDelta(
        content=message.content or "",
        reasoning=message.reasoning_content or message.reasoning or "",
        calls=tuple(message.tool_calls or ()),
        finish_reason=choice.finish_reason,
        usage=event.usage,
    )
