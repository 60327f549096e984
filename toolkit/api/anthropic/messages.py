"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API."""

import json
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, StrictBool
from starlette.responses import Response

from toolkit.api.http.body_fields import BY_KIND, LIST, TEXT, Body, RequestBody, Route, Text
from toolkit.api.http.client_fields import REFUSED_BY_ANTHROPIC, REFUSED_IN_ANTHROPIC_MESSAGES
from toolkit.api.http.error_bodies import anthropic_error
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access
from toolkit.api.http.server import target_of
from toolkit.api.http.streaming import EventStream, while_connected
from toolkit.api.openai.answer_parts import AnswerPart
from toolkit.api.openai.conversation import (
    ChatAnswer,
    Conversation,
    encode_conversation,
    start_answer,
)
from toolkit.api.openai.response_format import Schema
from toolkit.api.openai.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    STOPS,
    Int,
    ReasoningEffort,
    answer_params,
    end_options,
    reasoning_options,
)
from toolkit.api.openai.tools import (
    Tool,
    ToolName,
    ToolUse,
    only_type,
    parse_arguments,
    template_call,
)
from toolkit.engine.front.feature_places import IMAGE, content_of, require_role
from toolkit.engine.front.pictures import PictureUrl
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams

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
}  # event type of a block's text, and the field that holds the text
# ---- requests

MANY = Field(max_length=MAX_MESSAGES, fail_fast=True)


def _check_arguments(value: Any) -> Any:
    """Unlike `encodable`, allow integers of any size: models write them in arguments."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        raise ValueError("must be valid Unicode, without lone surrogates") from None
    return value


class TextBlock(Body):
    type: Literal["text"]
    text: Text
    citations: Any = Field(None, description="Accepted as part of an earlier answer; not read")


class ImageSource(Body):
    type: Literal["base64", "url", "file"] = Field(description="file is not supported")
    media_type: Annotated[Text, Field(pattern=r"^[\w.+-]+/[\w.+-]+$")] | None = Field(
        None, description="Not read: a picture's first bytes show its format"
    )
    data: Text | None = Field(None, description="Picture in base64")
    url: Text | None = Field(None, description="http(s), file or data: URL, if allowed")
    file_id: Any = Field(None, description="Not supported: no files are stored")

    def to_url(self, place: str) -> PictureUrl:
        """`place`: the parameter of this source. Raises InvalidParamError."""
        if self.type == "file":
            raise InvalidParamError(
                f"{place}.file_id",
                "is not supported: this server stores no files. Send the picture in base64.",
            )
        name = "data" if self.type == "base64" else "url"
        if (value := getattr(self, name)) is None:
            raise InvalidParamError(f"{place}.{name}", "is missing.")
        url = f"data:{self.media_type or ''};base64,{value}" if name == "data" else value
        return PictureUrl(url, f"{place}.{name}")


class ImageTransformations(Body):
    oversized_image: Literal["downsize"] | None = Field(
        None, description="Large pictures are always resized: error is not supported"
    )


class ImageBlock(Body):
    """Picture, in messages of the user and in results of tool calls."""

    type: Literal["image"]
    source: ImageSource
    transformations: ImageTransformations | None = None


class ThinkingBlock(Body):
    """Reasoning of an earlier answer. The chat template decides whether the model sees it."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: Text | None = None
    signature: str | None = None
    data: str | None = None


class CallBlock(Body):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Annotated[dict[str, Any], AfterValidator(_check_arguments)]


def _check_block_types(*types: str) -> BeforeValidator:
    """Name an unsupported type here: pydantic's error is about tags."""

    def check(content: Any) -> Any:
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in types:
                raise ValueError(
                    f"Only content blocks of the types {', '.join(types)} are supported here, not "
                    f"{kind[:32]!a}"
                )
        return content

    return BeforeValidator(check)


BY_TYPE = Field(discriminator="type")
ResultContent = Annotated[
    Annotated[Text, TEXT] | Annotated[list[Annotated[TextBlock | ImageBlock, BY_TYPE]], MANY, LIST],
    BY_KIND,
    _check_block_types("text", "image"),
]


class ResultBlock(Body):
    """Result of a tool call, in the user's message."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: ResultContent = ""
    is_error: StrictBool = Field(
        False, description="Not read: chat templates have no place for it. Say it in the content"
    )


ContentBlock = Annotated[TextBlock | ImageBlock | ThinkingBlock | CallBlock | ResultBlock, BY_TYPE]
Content = Annotated[
    Annotated[Text, TEXT] | Annotated[list[ContentBlock], MANY, LIST],
    BY_KIND,
    _check_block_types("text", "image", "thinking", "redacted_thinking", "tool_use", "tool_result"),
]


class MessageParam(Body):
    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_ANTHROPIC_MESSAGES

    role: Literal["user", "assistant", "system"]
    content: Content
    output_config: Any = Field(None, description="Not read")

    def to_template(self) -> Iterator[dict[str, Any]]:
        """Yield a template's messages: one per call result, then reasoning, text and calls."""
        blocks = self.content if isinstance(self.content, list) else []
        for block in blocks:
            if isinstance(block, ResultBlock):
                yield {
                    "role": "tool",
                    "tool_call_id": block.tool_use_id,
                    "content": _content(block.content),
                }
        calls = [
            template_call(block.id, block.name, block.input)
            for block in blocks
            if isinstance(block, CallBlock)
        ]
        content = _content(self.content)
        message: dict[str, Any] = {"role": self.role, "content": content}
        if calls:
            message["content"] = content or None
            message["tool_calls"] = calls
        thoughts = [one.thinking for one in blocks if isinstance(one, ThinkingBlock)]
        if reasoning := "\n\n".join(filter(None, thoughts)):
            message["reasoning_content"] = reasoning
        if content or calls or not blocks:
            yield message

    def pictures(self, place: str) -> Iterator[PictureUrl]:
        """Yield the pictures in the order of `to_template`: those of call results come first.

        `place`: the parameter of this message. Raises InvalidParamError."""
        place = f"{place}.content"
        blocks = self.content if isinstance(self.content, list) else []
        for index, block in enumerate(blocks):
            if isinstance(block, ResultBlock):
                yield from _pictures(block.content, f"{place}[{index}].content", "tool")
        yield from _pictures(blocks, place, self.role)


class InputTool(Body):
    name: ToolName
    description: Text | None = None
    input_schema: Schema
    type: Literal["custom"] | None = None
    strict: StrictBool | None = Field(
        None,
        description="true: a required call has only the properties that the schema names; "
        "keywords that cannot be enforced are refused",
    )


class InputToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: StrictBool = False


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")

    def to_params(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(json=self.schema_, param="output_config.format")


class OutputConfig(Body):
    format: OutputFormat | None = Field(None, description="Constraint on the answer")
    effort: ReasoningEffort | None = Field(
        None, description="For chat templates that read reasoning_effort"
    )


class Thinking(Body):
    type: Literal["enabled", "adaptive", "disabled"] = Field(
        description="disabled sets enable_thinking to false for the chat template"
    )
    budget_tokens: Any = Field(None, description="Not read")
    display: Any = Field(None, description="Not read: reasoning is returned complete")
    block_binding: Any = Field(
        None, description="Not read: the chat template decides which earlier reasoning is shown"
    )


class CountRequest(RequestBody):
    """POST /v1/messages/count_tokens."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {"messages": [{"role": "user", "content": "What is a KV cache?"}]}
        }
    )

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_BY_ANTHROPIC

    model: str | None = None
    messages: Annotated[list[MessageParam], Field(min_length=1), MANY]
    system: Content | None = Field(None, description="System message before the conversation")
    tools: Annotated[list[InputTool] | None, only_type("custom")] = Field(
        None, max_length=MAX_TOOLS
    )
    tool_choice: InputToolChoice | None = None
    output_config: OutputConfig | None = None
    thinking: Thinking | None = None
    thread: Any = Field(None, description="Not supported: no conversations are stored")

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return {
            "stop": "stop_sequences",
            "prompt": "messages",
            "reasoning_effort": "output_config.effort",
        }

    def to_conversation(self, defaults: Mapping[str, Any]) -> Conversation:
        """`defaults`: of sampling. Raises InvalidRequestError for unsupported options."""
        if self.thread is not None:
            # Anthropic's client then sends the complete conversation.
            raise InvalidRequestError(
                "thread is not supported: this server stores no conversations. "
                "Send the complete conversation as messages.",
                param="thread",
                code="thread_unsupported_request",
            )
        config = self.output_config
        messages = [{"role": "system", "content": _text(self.system)}] if self.system else []
        messages += [converted for one in self.messages for converted in one.to_template()]
        pictures = [] if self.system is None else [*_pictures(self.system, "system", "system")]
        for index, message in enumerate(self.messages):
            pictures += message.pictures(f"messages[{index}]")
        is_continued = self.messages[-1].role == "assistant"
        if is_continued and config is not None and config.format is not None:
            raise InvalidRequestError(
                "output_config.format applies to complete answers, so the last message must be "
                "the user's.",
                param="output_config",
            )
        if not messages:
            raise InvalidRequestError("The conversation has no messages.", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise InvalidRequestError(
                f"The conversation has {len(messages)} messages and results of calls, of at most "
                f"{MAX_MESSAGES}.",
                param="messages",
            )
        is_thinking = self.thinking is None or self.thinking.type != "disabled"
        options = reasoning_options(None if config is None else config.effort)
        options |= {} if is_thinking else {"enable_thinking": False}
        return Conversation(
            messages=messages,
            pictures=pictures,
            options=options | end_options(not is_continued, continued=is_continued),
            tools=self._tool_use(),
            params=self._params(defaults),
        )

    def _params(self, defaults: Mapping[str, Any]) -> SamplingParams | None:
        """Return None: tokens are counted, and no answer is wanted."""
        return None

    def _tool_use(self) -> ToolUse:
        choice, mode, names = self.tool_choice, None, None
        is_named = choice is not None and choice.type == "tool"
        if choice is not None:
            mode = "required" if choice.type in ("any", "tool") else choice.type
            names = [choice.name or ""] if is_named else None
        tools = [
            Tool.of(one.name, one.description, one.input_schema, one.strict)
            for one in self.tools or ()
        ]
        parallel = choice is None or not choice.disable_parallel_tool_use
        return ToolUse.choose(tools, mode, names, is_named=is_named, parallel=parallel)


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

    max_tokens: int = Field(description="Maximum tokens to generate", examples=[64])
    stop_sequences: Annotated[list[Text], STOPS] | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    stream: StrictBool = False
    metadata: Any = Field(None, description="Accepted for compatibility; not stored")

    def _params(self, defaults: Mapping[str, Any]) -> SamplingParams | None:
        """Return the parameters of the answer. Raises InvalidRequestError."""
        output = None if self.output_config is None else self.output_config.format
        return answer_params(
            defaults,
            self.max_tokens,
            {
                "stop": self.stop_sequences,
                "temperature": self.temperature,
                "top_k": self.top_k,
                "top_p": self.top_p,
            },
            structured_outputs=None if output is None else output.to_params(),
        )


def _text(content: str | Sequence[Body]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def _content(content: str | Sequence[Body]) -> str | list[dict[str, str]]:
    """Return a template's content: text, or parts if there are pictures."""
    if isinstance(content, str):
        return content
    return content_of(
        (
            block.text if isinstance(block, TextBlock) else IMAGE
            for block in content
            if isinstance(block, TextBlock | ImageBlock)
        ),
        joint="\n",
    )


def _pictures(content: str | Sequence[Body], place: str, role: str) -> Iterator[PictureUrl]:
    """Yield the pictures of blocks. `place`: their parameter. Raises InvalidParamError."""
    for index, block in enumerate(() if isinstance(content, str) else content):
        if isinstance(block, ImageBlock):
            picture = block.source.to_url(f"{place}[{index}].source")
            require_role(role, picture.param)
            yield picture


# ---- answers


@router.post(
    "/v1/messages", response_model=None, responses=answers("Anthropic's Message", stream=True)
)
@access(Access.MODEL_WORK)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation."""
    target = target_of(request, body)
    id = f"msg_{request.state.request_id}"
    asked = body.to_conversation(target.engine.default_sampling)
    answer = await start_answer(target, asked, request, id)
    if body.stream:
        events = _events(answer, id, target.name)
        return EventStream(
            events,
            answer.group.close,
            target.server.config.sse_keep_alive,
            lambda error: _event(**anthropic_error(error, request.state.request_id)),
        )
    try:
        done = await while_connected(request, _collect(answer, id, target.name))
    finally:
        answer.group.close()
    return Response(_encoder.encode(done), media_type="application/json")


@router.post(
    "/v1/messages/count_tokens",
    response_model=None,
    responses=answers("input_tokens: tokens of the prompt"),
)
@access(Access.MODEL_WORK)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Count the tokens of a conversation's prompt."""
    target = target_of(request, body)
    prompt = await encode_conversation(target, body.to_conversation({}), request)
    return Response(_encoder.encode({"input_tokens": len(prompt)}), media_type="application/json")


async def _collect(answer: ChatAnswer, id: str, model: str) -> dict[str, Any]:
    blocks: list[tuple[AnswerPart, list[str]]] = []
    async for part in answer.parts():
        if not blocks or _begins_block(part, blocks[-1][0]):
            blocks.append((part, []))
        blocks[-1][1].append(part.text)
    content = [_block(first, "".join(texts)) for first, texts in blocks]
    return _message(answer, id, model) | {"content": content} | _stop_fields(answer)


async def _events(answer: ChatAnswer, id: str, model: str) -> AsyncGenerator[bytes, None]:
    yield _event("message_start", message=_message(answer, id, model)) + _event("ping")
    last: AnswerPart | None = None
    index = -1
    async for part in answer.parts():
        start = b""
        if last is None or _begins_block(part, last):
            if last is not None:
                start = _event("content_block_stop", index=index)
            index += 1
            start += _event("content_block_start", index=index, content_block=_block(part, ""))
        last = part
        delta_type, field = _DELTAS[part.kind]
        delta = {"type": delta_type, field: part.text}
        yield start + _event("content_block_delta", index=index, delta=delta)
    if last is not None:
        yield _event("content_block_stop", index=index)
    end = _event("message_delta", delta=_stop_fields(answer), usage=_usage(answer))
    yield end + _event("message_stop")


def _message(answer: ChatAnswer, id: str, model: str) -> dict[str, Any]:
    return {
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def _begins_block(part: AnswerPart, last: AnswerPart) -> bool:
    return part.kind != last.kind or part.begins


def _block(first: AnswerPart, text: str) -> dict[str, Any]:
    if first.kind == "reasoning":
        return {"type": "thinking", "thinking": text, "signature": ""}
    if first.kind == "call":
        return {
            "type": "tool_use",
            "id": first.id,
            "name": first.name,
            "input": parse_arguments(text),
        }
    return {"type": "text", "text": text, "citations": None}


def _stop_fields(answer: ChatAnswer) -> dict[str, Any]:
    sequence = answer.stop_reason if isinstance(answer.stop_reason, str) else None
    finish_reason = answer.finish_reason
    if answer.has_complete_calls and finish_reason == "stop":
        finish_reason = "tool_calls"
    reason = "stop_sequence" if sequence is not None else _STOP_REASONS.get(finish_reason or "")
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage(answer: ChatAnswer) -> dict[str, Any]:
    """Report cached tokens apart from the other input tokens."""
    usage = answer.group.usage()
    cached = usage.prompt_tokens_details.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
    }


def _event(type: str, **fields: Any) -> bytes:
    data = _encoder.encode({"type": type} | fields)
    return b"event: " + type.encode() + b"\ndata: " + data + b"\n\n"
