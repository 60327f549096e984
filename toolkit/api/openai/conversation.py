"""Shared by chats, responses and Anthropic's messages: the prompt of a conversation, its answer."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from starlette.requests import Request

from toolkit.api.http.error_bodies import validation_error
from toolkit.api.http.server import Target
from toolkit.api.http.streaming import while_connected
from toolkit.api.openai.answer_parts import AnswerParser, AnswerPart, AnswerPlan
from toolkit.api.openai.beams import start_beams
from toolkit.api.openai.generation import AnswerGroup, start_group
from toolkit.api.openai.schemas import ChatRequest
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.text.harmony import adapt_conversation, is_harmony
from toolkit.text.tokenizer import Tokenizer

_READS_OBJECTS = re.compile(r"\.(?:items|keys)\(|\|\s*(?:items|dictsort)\b")
"""In a chat template: it may read the arguments of calls one by one, and not take text."""
LONG_CONVERSATION = 20_000
"""Characters above which a conversation is rendered and tokenized in a thread."""


@dataclass(slots=True)
class ChatAnswer:
    """Running answers to one conversation."""

    group: AnswerGroup
    plan: AnswerPlan
    tokenizer: Tokenizer
    params: SamplingParams
    finish_reason: str | None = None  # set when `parts` is exhausted
    stop_reason: int | str | None = None
    has_complete_calls: bool = False

    async def parts(self) -> AsyncIterator[AnswerPart]:
        """Yield the single answer as it arrives. Raises EngineError."""
        parser = AnswerParser(self.plan) if self.plan.has_parts else None
        async for _, delta in self.group.deltas():
            reason = delta.finish_reason
            if parser is None:
                parts = [AnswerPart("text", delta.text)] if delta.text else []
            else:
                parts = parser.parts(delta.text, reason, delta.stop_reason)
                reason = None if reason is None else parser.finish_reason(reason)
                self.has_complete_calls = parser.has_complete_calls
            for part in parts:
                yield part
            if reason is not None:
                self.finish_reason, self.stop_reason = reason, delta.stop_reason


async def start_answer(
    target: Target, body: ChatRequest, request: Request, request_id: str
) -> ChatAnswer:
    """Start the answers to a conversation. Raises InvalidRequestError."""
    params = body.params(target.engine.default_sampling)
    prompt = await encode_conversation(target, body, request)
    tokenizer = target.engine.tokenizer
    assert tokenizer is not None, "without a tokenizer there is no chat prompt"
    plan = AnswerPlan.of(body, prompt, tokenizer, target.server.plugins.parsers)
    params = plan.constrain(params, tokenizer)
    if body.use_beam_search:
        group = await start_beams(
            target,
            [prompt],
            body,
            request_id=request_id,
            skip_special_tokens=params.skip_special_tokens,
        )
    else:
        group = await start_group(
            target, [prompt], params, request_id=request_id, priority=body.priority
        )
    return ChatAnswer(group, plan, tokenizer, params)


async def encode_conversation(target: Target, body: ChatRequest, request: Request) -> list[int]:
    """Return the prompt tokens of a conversation.

    A long conversation is rendered in a thread, and the request's own template in another process:
    the event loop stays free. Raises InvalidRequestError if the chat template refuses the messages,
    or the model an option."""
    options = body.template_options(trusted=target.server.config.trust_request_chat_template)
    if tools := body.callable_tools:
        options["tools"] = [tool.model_dump(exclude_none=True, by_alias=True) for tool in tools]
    messages, options = _adapt(target, body, options)
    allow = target.server.config.allow_special_tokens_in_messages
    if body.chat_template is not None:
        given = {"messages": messages, **options}
        return await _encode_apart(target, request, body.chat_template, given, allow)

    def encode() -> list[int]:
        return target.engine.chat_prompt(messages, allow_special_tokens=allow, **options)

    is_long = _estimate_length(body) > LONG_CONVERSATION
    return await asyncio.to_thread(encode) if is_long else encode()


async def _encode_apart(
    target: Target, request: Request, template: str, given: dict[str, Any], allow: bool
) -> list[int]:
    """Return the prompt tokens of a conversation in the template of its request."""
    inputs = target.engine.inputs
    inputs.require_generation()
    tokenizer = inputs.require_tokenizer()
    separator = None
    if not allow:
        given, separator = await asyncio.to_thread(tokenizer.protect, given)
    rendering = target.server.templates.render(
        tokenizer.find_template(template), tokenizer.special_tokens, given
    )
    text = await while_connected(request, rendering)
    return await asyncio.to_thread(inputs.encode_chat, text, separator)


def _estimate_length(body: ChatRequest) -> int:
    """Estimate the characters a template processes, with a constant per message, call and tool."""
    length = 100 * len(body.messages) + 500 * len(body.callable_tools)
    for message in body.messages:
        length += len(message.content or "") if isinstance(message.content, str) else 0
        length += sum(len(part.text) for part in message.content or () if not isinstance(part, str))
        length += len(message.reasoning_content or "")
        length += sum(100 + len(call.function.arguments) for call in message.tool_calls or ())
    return length


def make_chat_request(**fields: Any) -> ChatRequest:
    """Build the chat request that another interface's request means. Raises InvalidRequestError."""
    try:
        return ChatRequest.model_validate(
            {name: value for name, value in fields.items() if value is not None}
        )
    except ValidationError as error:
        raise validation_error(
            [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
        ) from None


@contextmanager
def rename_params(names: Mapping[str, str]) -> Iterator[None]:
    """Report errors under an interface's own names of the chat parameters in `names`."""
    try:
        yield
    except InvalidRequestError as error:
        raise error.renamed(names) from None


def _adapt(
    target: Target, body: ChatRequest, options: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and options as the chat template takes them.

    `system` replaces `developer` if the template lacks that role. Raises InvalidRequestError for
    what the model does not have."""
    messages = body.conversation()
    tokenizer = target.engine.tokenizer
    template = ""
    if tokenizer is not None:
        given = body.chat_template
        template = tokenizer.find_template(given) if given else tokenizer.chat_template_text
    broken = [call for one in messages for call in one.get("tool_calls", ()) if _is_broken(call)]
    if broken and _READS_OBJECTS.search(template):
        for call in broken:
            call["function"]["arguments"] = {}
    if is_harmony(template):
        return adapt_conversation(messages, options)
    if "developer" not in template:
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    return messages, options


def _is_broken(call: dict[str, Any]) -> bool:
    return not isinstance(call["function"]["arguments"], dict)
