"""POST /v1/messages: Anthropic's interface."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import AfterValidator, ConfigDict, Field
from starlette.responses import Response

from toolkit.api.http.body_fields import BY_KIND, LIST, TEXT, Body, Route, Text, WholeBody
from toolkit.api.http.error_bodies import anthropic_error
from toolkit.api.http.openapi import answers
from toolkit.api.http.service import service_for
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.openai.conversation import Piece, Talk, as_chat, begin, chat_prompt, named_as
from toolkit.api.openai.response_format import Schema
from toolkit.api.openai.schemas import MAX_MESSAGES, ChatRequest
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["Anthropic"], route_class=Route)
_encoder = msgspec.json.Encoder()

_STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "pause_turn",
}
_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}
"""The type of a block's events, and where they have the text."""
_NAMES = {"stop": "stop_sequences", "prompt": "messages", "response_format": "output_config.format"}
"""What a chat's parameters are called here."""

# ---- requests

MANY = Field(max_length=MAX_MESSAGES, fail_fast=True)


def _writable(value: Any) -> Any:
    """What a model has called a tool with, and the client sends back, may have numbers of any size. Raises ValueError for text that
    cannot be encoded.
    """
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("Input should be valid Unicode, without lone surrogates") from None
    return value


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    cache_control: Any = Field(
        None, description="Not needed: what prompts have in common is always cached"
    )
    citations: Any = Field(None, description="Of an earlier answer; not read")


class ThinkingBlock(Body):
    """What a model thought before an earlier answer: it is not given to it again."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text | None = None
    signature: str | None = None
    data: str | None = None


class CallBlock(Body):
    """A call of a tool, in an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(_writable)]
    cache_control: Any = None


class ResultBlock(Body):
    """What a call gave, in the user's turn."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Annotated[Annotated[Text, TEXT] | Annotated[list[TextBlock], MANY, LIST], BY_KIND] = ""
    is_error: bool = Field(
        False, description="The content says so itself: templates have no place for this"
    )
    cache_control: Any = None


Block = Annotated[
    TextBlock | ThinkingBlock | CallBlock | ResultBlock,
    Field(discriminator="type"),
]
Content = Annotated[Annotated[Text, TEXT] | Annotated[list[Block], MANY, LIST], BY_KIND]


class InputMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: Content

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """The same as messages of a chat: what calls gave comes first, in messages of their own."""
        blocks = self.content if isinstance(self.content, list) else []
        for block in blocks:
            if isinstance(block, ResultBlock):
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _text(block.content),
                }
        calls = [_call(block) for block in blocks if isinstance(block, CallBlock)]
        text = _text(self.content)
        if text or calls or not blocks:
            yield {"role": self.role, "content": text} | ({"tool_calls": calls} if calls else {})


class InputTool(Body):
    name: Text
    description: Text | None = None
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    strict: bool | None = Field(
        None, description="Refuses a schema that cannot be held wholly, where the call is required"
    )
    cache_control: Any = None


class InputToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: bool = False

    def for_chat(self) -> str | dict[str, Any]:
        """As a chat says it."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")

    def for_chat(self) -> dict[str, Any]:
        """As a chat's `response_format`."""
        return {"type": self.type, "json_schema": {"schema": self.schema_, "strict": True}}


class OutputConfig(Body):
    format: OutputFormat | None = Field(None, description="What the answer is held to")


class CountRequest(WholeBody):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
        }
    )

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(min_length=1), MANY]
    system: Content | None = Field(None, description="What the system says first")
    tools: list[InputTool] | None = None
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None
    thread: Any = Field(None, description="Not supported: nothing is stored")

    def chat(self) -> ChatRequest:
        """The same as a chat request. Raises InvalidRequestError for what is not supported."""
        return self._chat()

    def _chat(self, **more: Any) -> ChatRequest:
        if self.thread is not None:
            # Anthropic's client sends the whole conversation when it reads this code.
            raise InvalidRequestError(
                "thread is not supported: this server stores no conversations. Send the whole conversation as messages.",
                param="thread",
                code="thread_unsupported_request",
            )
        form = None if self.output_config is None else self.output_config.format
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages += [told for one in self.messages for told in one.for_chat()]
        choice = self.tool_choice
        # An answer that the client has begun is gone on with.
        begun = self.messages[-1].role == "assistant"
        if begun and form is not None:
            raise InvalidRequestError(
                "output_config.format is of whole answers: the last message is the user's then.",
                param="output_config",
            )
        return as_chat(
            messages=messages,
            tools=[_tool(tool) for tool in self.tools] if self.tools else None,
            tool_choice=None if choice is None else choice.for_chat(),
            parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
            response_format=None if form is None else form.for_chat(),
            continue_final_message=begun,
            add_generation_prompt=not begun,
            **more,
        )


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is a KV cache?"}],
                "max_tokens": 64,
            }
        }
    )

    max_tokens: int = Field(description="Most tokens to generate", examples=[64])
    stop_sequences: list[Text] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    stream: bool = False
    metadata: Any = Field(None, description="Taken for compatibility; kept nowhere")

    def chat(self) -> ChatRequest:
        """The same as a chat request. Raises InvalidRequestError for what is not supported."""
        return self._chat(
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
        )


def _text(content: str | Sequence[Body]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _call(block: CallBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
    return {"id": block.id, "type": "function", "function": function}


def _tool(tool: InputTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.input_schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": function}


# ---- answers


@router.post(
    "/v1/messages", response_model=None, responses=answers("Anthropic's Message", stream=True)
)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answers a conversation."""
    service = service_for(request, body)
    id = f"msg_{request.state.request_id}"
    chat = body.chat()
    with named_as(_NAMES):
        talk = await begin(service, chat, id)
    if body.stream:
        events = _events(talk, id, service.model_name)
        return EventStream(
            events,
            talk.group.close,
            service.config.sse_keep_alive,
            lambda error: _event(**anthropic_error(error, request.state.request_id)),
        )
    try:
        done = await while_connected(request, _collect(talk, id, service.model_name))
    finally:
        talk.group.close()
    return Response(_encoder.encode(done), media_type="application/json")


@router.post(
    "/v1/messages/count_tokens", response_model=None, responses=answers("input_tokens: how many")
)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """How many tokens the prompt of a conversation has."""
    service = service_for(request, body)
    chat = body.chat()
    with named_as(_NAMES):
        prompt = await chat_prompt(service, chat)
    return Response(_encoder.encode({"input_tokens": len(prompt)}), media_type="application/json")


async def _collect(talk: Talk, id: str, model: str) -> dict[str, Any]:
    blocks: list[tuple[Piece, list[str]]] = []
    async for piece in talk.pieces():
        if not blocks or _begins(piece, blocks[-1][0]):
            blocks.append((piece, []))
        blocks[-1][1].append(piece.text)
    content = [_block(piece, "".join(texts)) for piece, texts in blocks]
    return _message(talk, id, model) | {"content": content} | _stopped(talk)


async def _events(talk: Talk, id: str, model: str) -> AsyncGenerator[bytes, None]:
    yield _event("message_start", message=_message(talk, id, model)) + _event("ping")
    last: Piece | None = None
    index = -1
    async for piece in talk.pieces():
        begin = b""
        if last is None or _begins(piece, last):
            if last is not None:
                begin = _event("content_block_stop", index=index)
            index += 1
            begin += _event("content_block_start", index=index, content_block=_block(piece, ""))
        last = piece
        delta = {"type": _DELTAS[piece.kind][0], _DELTAS[piece.kind][1]: piece.text}
        yield begin + _event("content_block_delta", index=index, delta=delta)
    if last is not None:
        yield _event("content_block_stop", index=index)
    yield _event("message_delta", delta=_stopped(talk), usage=_usage(talk)) + _event("message_stop")


def _message(talk: Talk, id: str, model: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(talk),
    }


def _begins(piece: Piece, last: Piece) -> bool:
    """Whether a block begins with a piece."""
    return piece.kind != last.kind or piece.id is not None


def _block(begin: Piece, text: str) -> dict[str, Any]:
    """A block that begins with this piece."""
    if begin.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if begin.kind == "call":
        return {"type": "tool_use", "id": begin.id, "name": begin.name, "input": _arguments(text)}
    return {"type": "text", "text": text, "citations": None}


def _arguments(text: str) -> Any:
    """A call that was cut has none that can be read."""
    try:
        return msgspec.json.decode(text or b"{}")
    except msgspec.DecodeError:
        return {}


def _stopped(talk: Talk) -> dict[str, Any]:
    sequence = talk.stop_reason if isinstance(talk.stop_reason, str) else None
    finished = "tool_calls" if talk.calls and talk.finish_reason == "stop" else talk.finish_reason
    reason = "stop_sequence" if sequence is not None else _STOP_REASONS.get(finished or "")
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(talk: Talk) -> dict[str, Any]:
    """What was read from the cache is counted apart."""
    usage = talk.group.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(type: str, **more: Any) -> bytes:
    return (
        b"event: " + type.encode() + b"\ndata: " + _encoder.encode({"type": type} | more) + b"\n\n"
    )
