"""What every kind of conversation shares: the prompt that its messages make, and the answer as it comes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from toolkit.api.http.error_bodies import validation_error
from toolkit.api.http.service import Service
from toolkit.api.openai.answer_parts import AnswerPlan
from toolkit.api.openai.generation import Group, start
from toolkit.api.openai.replies import ChatDelta
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.openai.tools import Function
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.text.tokenizer import Tokenizer

LONG_CONVERSATION = 20_000
"""Characters above which a conversation is rendered and tokenized in a thread."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes of an answer: reasoning, text, or the arguments of a call, with `id` and `name` where one begins."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Talk:
    """A conversation whose answers are on their way."""

    group: Group
    plan: AnswerPlan
    tokenizer: Tokenizer
    params: SamplingParams
    finish_reason: str | None = None
    """Of the answer that `pieces` has read to its end."""
    stop_reason: int | str | None = None
    calls: bool = False
    """Whether it has called a tool, with all of the arguments."""

    async def pieces(self) -> AsyncIterator[Piece]:
        """The one answer as it comes, in its parts. Raises EngineError."""
        parser = self.plan.parser() if self.plan.splits else None
        async for _, delta in self.group.deltas():
            reason = delta.finish_reason
            told = ChatDelta(content=delta.text)
            if parser is not None:
                told = parser.add(delta.text, ended=reason is not None)
                reason = None if reason is None else parser.finish_reason(reason)
                self.calls = parser.called
            if told.reasoning_content:
                yield Piece("reasoning", told.reasoning_content)
            if told.content:
                yield Piece("text", told.content)
            for call in told.tool_calls or ():
                function = call.function or Function()
                yield Piece("call", function.arguments or "", call.id, function.name)
            if reason is not None:
                self.finish_reason, self.stop_reason = reason, delta.stop_reason


async def begin(service: Service, body: ChatRequest, request_id: str) -> Talk:
    """Starts the answers to a conversation. Raises InvalidRequestError."""
    params = body.params(service.engine.default_sampling)
    prompt = await chat_prompt(service, body)
    tokenizer = service.engine.tokenizer
    assert tokenizer is not None, "without a tokenizer there is no chat prompt"
    plan = AnswerPlan.of(body, prompt, tokenizer, service.config)
    params = plan.params(params, tokenizer)
    group = await start(service, [prompt], params, request_id=request_id, priority=body.priority)
    return Talk(group, plan, tokenizer, params)


async def chat_prompt(service: Service, body: ChatRequest) -> list[int]:
    """The tokens of a conversation. A long one, and a template that the client brings, leave the loop alone.

    Raises InvalidRequestError for what the chat template does not take.
    """
    options = body.template_options(trusted=service.config.trust_request_chat_template)
    if tools := body.callable_tools:
        options["tools"] = [tool.model_dump(exclude_none=True, by_alias=True) for tool in tools]
    messages = _in_known_roles(service, body)

    def render() -> list[int]:
        allow = service.config.allow_special_tokens_in_messages
        return service.engine.chat_prompt(messages, allow_special_tokens=allow, **options)

    if "chat_template" in options or _length(body) > LONG_CONVERSATION:
        return await asyncio.to_thread(render)
    return render()


def _length(body: ChatRequest) -> int:
    """Characters of what a template is given, about: a message, a call and a tool's fields are some by themselves."""
    length = 100 * len(body.messages) + 500 * len(body.callable_tools)
    for message in body.messages:
        length += len(message.content or "") if isinstance(message.content, str) else 0
        length += sum(len(part.text) for part in message.content or () if not isinstance(part, str))
        length += len(message.reasoning_content or "")
        length += sum(100 + len(call.function.arguments) for call in message.tool_calls or ())
    return length


def as_chat(**fields: Any) -> ChatRequest:
    """The chat request that says the same as another kind of request. Raises InvalidRequestError."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise validation_error(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """What is wrong with a request is told by the names that its own interface has for a chat's parameters."""
    try:
        yield
    except InvalidRequestError as error:
        first, dot, rest = (error.param or "").partition(".")
        if first not in names:
            raise
        # A name that is an English word, too, stands for itself only where the message begins with it.
        place = rf"\b{first}\b" if "_" in first else rf"^{first}\b"
        message = re.sub(place, names[first], error.message)
        raise InvalidRequestError(
            message, param=names[first] + dot + rest, code=error.code
        ) from None


def _in_known_roles(service: Service, body: ChatRequest) -> list[dict[str, Any]]:
    """What newer clients call the developer is the system where the template knows no developer."""
    messages = body.conversation()
    tokenizer = service.engine.tokenizer
    template = body.chat_template or (tokenizer.chat_template_text if tokenizer is not None else "")
    if "developer" in template:
        return messages
    return [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
