"""POST /v1/responses: OpenAI's newer interface, for text. Nothing is stored."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from starlette.responses import Response

from toolkit.api.docs import answers
from toolkit.api.errors import error_detail
from toolkit.api.fields import BY_KIND, LIST, TEXT, TO_FIRST_MISTAKE, Body, Route, Text
from toolkit.api.schemas import ChatRequest
from toolkit.api.service import service_for
from toolkit.api.streaming import EventStream, while_connected
from toolkit.api.structured import JsonSchemaFormat
from toolkit.api.talk import Piece, Talk, as_chat, begin
from toolkit.errors import InvalidRequestError

router = APIRouter(tags=["OpenAI"], route_class=Route)
_encoder = msgspec.json.Encoder()

# ---- requests


class InputPart(Body):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: Any = Field(None, exclude=True, description="Of an earlier answer; not read")
    logprobs: Any = Field(None, exclude=True, description="Of an earlier answer; not read")


def _only_messages(items: Any) -> Any:
    """Says what is not taken, before the kinds that are complain one by one."""
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in ("message", "reasoning"):
            raise ValueError(f"Items are messages here; got one of type {kind[:32]!a}")
        for part in _listed(item, "content"):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("input_image", "input_file", "input_audio"):
                raise ValueError(f"Content is text here; got {kind!r}")
    return items


def _listed(item: Any, name: str) -> list[Any]:
    found = item.get(name) if isinstance(item, dict) else None
    return found if isinstance(found, list) else []


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Annotated[Annotated[Text, TEXT] | Annotated[list[InputPart], TO_FIRST_MISTAKE, LIST], BY_KIND]
    id: str | None = Field(None, description="Of an earlier answer; not read")
    status: str | None = Field(None, description="Of an earlier answer; not read")
    phase: str | None = Field(None, description="Of an earlier answer; not read")

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text or part.refusal or "" for part in self.content)


class InputReasoning(Body):
    """What a model thought before an earlier answer: it is not given to it again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    status: str | None = None
    encrypted_content: Any = None


def _kind_of_item(item: Any) -> str:
    is_reasoning = isinstance(item, dict) and item.get("type") == "reasoning"
    return "(reasoning)" if is_reasoning else "(message)"


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")] | Annotated[InputReasoning, Tag("(reasoning)")],
    Discriminator(_kind_of_item),
]
Input = Annotated[
    Annotated[Text, TEXT] | Annotated[list[Item], TO_FIRST_MISTAKE, LIST],
    BY_KIND,
    BeforeValidator(_only_messages),
]


class TextFormat(JsonSchemaFormat):
    """As chat's `response_format`, with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def shown(self) -> dict[str, Any]:
        """As it was given, without what nobody reads."""
        known = set(type(self).model_fields)
        return {"type": self.type} | self.model_dump(by_alias=True, exclude_unset=True, include=known)

    def for_chat(self) -> dict[str, Any]:
        """With the schema in a table of its own."""
        schema = {name: value for name, value in self.shown().items() if name != "type"}
        if not schema and self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    format: TextFormat | None = Field(None, description="text, json_object or json_schema")


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is a KV cache?", "max_output_tokens": 64}}
    )

    model: str | None = None
    input: Input = Field(examples=["What is a KV cache?"])
    instructions: Text | None = Field(None, description="What the system says first")
    max_output_tokens: int | None = Field(None, description="Most tokens to generate")
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: an input that is too long loses its beginning"
    )
    stream: bool = False
    store: bool | None = Field(None, description="Only false: nothing is stored")
    metadata: dict[Text, Text] | None = None
    user: Text | None = None
    tools: list[Any] | None = Field(None, description="Not supported; /v1/chat/completions has tools")
    previous_response_id: str | None = Field(None, description="Not supported: nothing is stored")
    conversation: Any = Field(None, description="Not supported: nothing is stored")
    prompt: Any = Field(None, description="Not supported: nothing is stored")
    background: bool | None = Field(None, description="Not supported: nothing is stored")

    def chat(self) -> ChatRequest:
        """The same as a chat request. Raises InvalidRequestError for what is not supported."""
        for name in ("store", "previous_response_id", "conversation", "prompt", "background"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} is not supported: this server stores no responses. Send the whole conversation as input.",
                    param=name,
                )
        if self.tools:
            raise InvalidRequestError(
                "tools are not supported here; /v1/chat/completions has them.", param="tools"
            )
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            messages += [
                {"role": one.role, "content": one.text} for one in self.input if isinstance(one, InputMessage)
            ]
        return as_chat(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            response_format=self.text.format.for_chat()
            if self.text is not None and self.text.format
            else None,
        )


# ---- answers


@router.post("/v1/responses", response_model=None, responses=answers("OpenAI's Response", stream=True))
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """Answers an input, or goes on with a conversation, which is sent whole."""
    service = service_for(request, body)
    name = request.state.request_id
    talk = await begin(service, body.chat(), f"resp_{name}")
    answer = _Answer(body, talk, name, service.model_name)
    if body.stream:
        return EventStream(
            answer.events(), talk.group.close, service.config.sse_keep_alive, answer.error_event
        )
    try:
        done = await while_connected(request, answer.collect())
    finally:
        talk.group.close()
    return Response(_encoder.encode(done), media_type="application/json")


class _Item:
    """A part of the output: the model's reasoning, or its message."""

    def __init__(self, kind: Literal["reasoning", "text"], name: str, index: int) -> None:
        self.kind, self.index = kind, index
        self.id = f"{'rs' if kind == 'reasoning' else 'msg'}_{name}_{index}"
        self.part_type = "reasoning_text" if kind == "reasoning" else "output_text"
        self.texts: list[str] = []

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.part_type, "text": text}
        return part if self.kind == "reasoning" else part | {"annotations": [], "logprobs": []}

    def shown(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [self.part("".join(self.texts))]
        if self.kind == "reasoning":
            return {"id": self.id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}


class _Answer:
    """A response on its way."""

    def __init__(self, body: ResponsesRequest, talk: Talk, name: str, model: str) -> None:
        self._body, self._talk, self._name, self._model = body, talk, name, model
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._num_events = 0

    async def collect(self) -> dict[str, Any]:
        async for piece in self._talk.pieces():
            self._item(_kind(piece)).texts.append(piece.text)
        self._item("text")
        return self._response(self._status())

    async def events(self) -> AsyncGenerator[bytes, None]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for piece in self._talk.pieces():
            for event in self._enter(_kind(piece)):
                yield event
            item = self._items[-1]
            item.texts.append(piece.text)
            yield self._part_event(f"response.{item.part_type}.delta", delta=piece.text, **_no_logprobs(item))
        for event in self._enter("text"):
            yield event
        status = self._status()
        for event in self._leave(status):
            yield event
        name = "completed" if status == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=self._response(status))

    def error_event(self, error: Exception) -> bytes:
        """What a client of a stream gets when the answer cannot be finished."""
        detail = error_detail(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param)

    def _item(self, kind: Literal["reasoning", "text"]) -> _Item:
        """The last one, which is made when it is of another kind."""
        if not self._items or self._items[-1].kind != kind:
            self._items.append(_Item(kind, self._name, len(self._items)))
        return self._items[-1]

    def _enter(self, kind: Literal["reasoning", "text"]) -> Sequence[bytes]:
        """What is told when a part of this kind begins, if it does."""
        if self._items and self._items[-1].kind == kind:
            return ()
        before = self._leave("completed") if self._items else []
        item = self._item(kind)
        return [
            *before,
            self._event(
                "response.output_item.added", output_index=item.index, item=item.shown("in_progress")
            ),
            self._part_event("response.content_part.added", part=item.part("")),
        ]

    def _leave(self, status: str) -> list[bytes]:
        item = self._items[-1]
        text = "".join(item.texts)
        return [
            self._part_event(f"response.{item.part_type}.done", text=text, **_no_logprobs(item)),
            self._part_event("response.content_part.done", part=item.part(text)),
            self._event("response.output_item.done", output_index=item.index, item=item.shown(status)),
        ]

    def _part_event(self, type: str, **more: Any) -> bytes:
        item = self._items[-1]
        return self._event(type, item_id=item.id, output_index=item.index, content_index=0, **more)

    def _event(self, type: str, **more: Any) -> bytes:
        content = {"type": type, "sequence_number": self._num_events} | more
        self._num_events += 1
        return b"event: " + type.encode() + b"\ndata: " + _encoder.encode(content) + b"\n\n"

    def _status(self) -> str:
        return "completed" if self._talk.finish_reason in ("stop", "tool_calls") else "incomplete"

    def _response(self, status: str) -> dict[str, Any]:
        body, params, usage = self._body, self._talk.params, self._talk.group.usage()
        is_done = status != "in_progress"
        text = body.text.format.shown() if body.text is not None and body.text.format else None
        finished = self._talk.finish_reason
        reason = "max_output_tokens" if finished == "length" else finished
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [item.shown(self._status_of(item, status)) for item in self._items] if is_done else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {
                    "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                    "cache_write_tokens": 0,
                },
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
                "total_tokens": usage.total_tokens,
            }
            if is_done
            else None,
            "user": body.user,
        }

    def _num_reasoning_tokens(self) -> int:
        """By its text: pieces do not come token by token. Whatever that gives, never more than there were."""
        text = "".join("".join(item.texts) for item in self._items if item.kind == "reasoning")
        tokens = self._talk.tokenizer.encode(text, add_special_tokens=False) if text else []
        return min(len(tokens), self._talk.group.num_tokens)

    def _status_of(self, item: _Item, status: str) -> str:
        """All items but the last are whole."""
        return status if item is self._items[-1] else "completed"


def _kind(piece: Piece) -> Literal["reasoning", "text"]:
    """Without tools there are no calls."""
    return "reasoning" if piece.kind == "reasoning" else "text"


def _no_logprobs(item: _Item) -> dict[str, Any]:
    """Events of output text have a place for them."""
    return {"logprobs": []} if item.kind == "text" else {}
