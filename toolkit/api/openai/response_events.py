"""Builds a response from the parts of an answer: as one object, or as server-sent events."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import msgspec

from toolkit.api.http.body_fields import Body
from toolkit.api.http.error_bodies import error_detail
from toolkit.api.openai.answer_parts import AnswerPart
from toolkit.api.openai.conversation import ChatAnswer
from toolkit.api.openai.replies import TokenLogprob
from toolkit.api.openai.response_request import ResponsesRequest

_encoder = msgspec.json.Encoder()
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class _OutputItem:
    """Item of the output: reasoning, a message or a call."""

    def __init__(self, first: AnswerPart, name: str, index: int) -> None:
        self.kind, self.index = first.kind, index
        self.id = f"{_PREFIXES[first.kind]}_{name}_{index}"
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []  # of output text
        self.call_id, self.name = first.id, first.name  # of a call

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part_type(self) -> str:
        """Type of the item's content part. A call has no content."""
        return "reasoning_text" if self.kind == "reasoning" else "output_text"

    def with_logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return a field that events of output text need."""
        return {"logprobs": logprobs} if self.kind == "text" else {}

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.part_type, "text": text}
        if self.kind == "reasoning":
            return part
        return part | {"annotations": [], "logprobs": self.logprobs}

    def to_json(self, status: str) -> dict[str, Any]:
        if self.kind == "call":
            return {
                "id": self.id,
                "type": "function_call",
                "status": status,
                "call_id": self.call_id,
                "name": self.name,
                "arguments": self.text,
            }
        content = [] if status == "in_progress" else [self.part(self.text)]
        if self.kind == "reasoning":
            return {
                "id": self.id,
                "type": "reasoning",
                "summary": [],
                "content": content,
                "status": status,
            }
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }


class ResponseBuilder:
    """Builds one response."""

    def __init__(
        self,
        body: ResponsesRequest,
        answer: ChatAnswer,
        name: str,
        model: str,
        keep: Callable[[dict[str, Any]], Awaitable[bool]] | None = None,
    ) -> None:
        """`keep` stores a response, and returns False if it is too large to be stored."""
        self._body, self._answer, self._name, self._model = body, answer, name, model
        self._keep = keep
        self._created = int(time.time())
        self._items: list[_OutputItem] = []
        self._num_events = 0

    async def collect(self) -> dict[str, Any]:
        """Return the complete response. Raises EngineError."""
        async for part in self._parts():
            if self._begins_item(part):
                self._add_item(part)
            self._append(part)
        if self._needs_message:
            self._add_item(AnswerPart("text", ""))
        return await self._kept(self._response(self._status()))

    def begun(self) -> dict[str, Any]:
        """Return the response before its answer."""
        return self._response("in_progress")

    def failed(self, error: Exception) -> dict[str, Any]:
        """Return the response of an answer that failed."""
        detail = error_detail(error)
        code = "server_error" if detail.code is None else detail.code
        failure = {"code": code, "message": detail.message}
        return self._response("failed") | {"error": failure}

    async def _kept(self, response: dict[str, Any]) -> dict[str, Any]:
        """Store a response if it is to be stored."""
        if self._keep is not None and not await self._keep(response):
            response["store"] = False
        return response

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the response as server-sent events. Raises EngineError."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for part in self._parts():
            for event in self._start_item(part):
                yield event
            logprobs = self._append(part)
            item = self._items[-1]
            if item.kind != "call":
                yield self._part_event(
                    f"response.{item.part_type}.delta",
                    delta=part.text,
                    **item.with_logprobs(logprobs),
                )
            elif part.text:
                yield self._item_event("response.function_call_arguments.delta", delta=part.text)
        if self._needs_message:
            for event in self._start_item(AnswerPart("text", "")):
                yield event
        status = self._status()
        for event in self._finish_item(self._status_of(self._items[-1], status)):
            yield event
        name = "completed" if status == "completed" else "incomplete"
        response = await self._kept(self._response(status))
        yield self._event(f"response.{name}", response=response)

    def error_event(self, error: Exception) -> bytes:
        """Return the event for an answer that fails after the stream has begun."""
        detail = error_detail(error)
        fields = {"code": detail.code, "message": detail.message, "param": detail.param}
        event = self._event("error", **fields)
        self._num_events -= 1  # of a last will, which is seldom sent
        return event

    # ---- items

    @property
    def _needs_message(self) -> bool:
        """True if the output would not end with a message or a call. The message may be empty."""
        return not self._items or self._items[-1].kind == "reasoning"

    def _begins_item(self, part: AnswerPart) -> bool:
        return not self._items or self._items[-1].kind != part.kind or part.begins

    def _add_item(self, first: AnswerPart) -> _OutputItem:
        self._items.append(_OutputItem(first, self._name, len(self._items)))
        return self._items[-1]

    def _append(self, part: AnswerPart) -> list[TokenLogprob]:
        """Add a part to the last item. Returns the log-probabilities of its tokens."""
        item = self._items[-1]
        item.texts.append(part.text)
        if self._body.num_logprobs is None:
            return []
        new = self._answer.take_logprobs()
        if item.kind != "text":  # those of reasoning and calls are not reported
            return []
        item.logprobs += new
        return new

    async def _parts(self) -> AsyncIterator[AnswerPart]:
        """Yield the parts of the answer. Tokens at its end that have no text are an empty part."""
        async for part in self._answer.parts():
            yield part
        has_more = self._body.num_logprobs is not None and bool(self._answer.logprobs)
        if has_more and (not self._items or self._items[-1].kind == "text"):
            yield AnswerPart("text", "")

    def _start_item(self, part: AnswerPart) -> Sequence[bytes]:
        """Return the events of a new item, if `part` begins one."""
        if not self._begins_item(part):
            return ()
        finished = self._finish_item("completed") if self._items else []
        item = self._add_item(part)
        added = [
            self._event(
                "response.output_item.added",
                output_index=item.index,
                item=item.to_json("in_progress"),
            )
        ]
        if item.kind != "call":
            added.append(self._part_event("response.content_part.added", part=item.part("")))
        return [*finished, *added]

    def _finish_item(self, status: str) -> list[bytes]:
        item = self._items[-1]
        if item.kind == "call":
            done = [
                self._item_event(
                    "response.function_call_arguments.done", name=item.name, arguments=item.text
                )
            ]
        else:
            done = [
                self._part_event(
                    f"response.{item.part_type}.done",
                    text=item.text,
                    **item.with_logprobs(item.logprobs),
                ),
                self._part_event("response.content_part.done", part=item.part(item.text)),
            ]
        return [
            *done,
            self._event(
                "response.output_item.done", output_index=item.index, item=item.to_json(status)
            ),
        ]

    # ---- events

    def _part_event(self, type: str, **fields: Any) -> bytes:
        return self._item_event(type, content_index=0, **fields)

    def _item_event(self, type: str, **fields: Any) -> bytes:
        item = self._items[-1]
        return self._event(type, item_id=item.id, output_index=item.index, **fields)

    def _event(self, type: str, **fields: Any) -> bytes:
        content = {"type": type, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return b"event: " + type.encode() + b"\ndata: " + _encoder.encode(content) + b"\n\n"

    # ---- the response

    def _status(self) -> str:
        finish_reason = self._answer.finish_reason
        if finish_reason == "abort" and self._body.background:
            return "cancelled"
        return "completed" if finish_reason in ("stop", "tool_calls") else "incomplete"

    def _status_of(self, item: _OutputItem, status: str) -> str:
        """Return the status of an item. Only the last one can be incomplete."""
        if item is not self._items[-1]:
            return "completed"
        is_cut = item.kind == "call" and not self._answer.has_complete_calls
        return "incomplete" if is_cut or status in ("cancelled", "failed") else status

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._answer.params
        is_done = status != "in_progress"
        text = body.text.format.to_json() if body.text is not None and body.text.format else None
        reason = self._answer.finish_reason
        reason = "max_output_tokens" if reason == "length" else reason
        choice = body.tool_choice
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "background": bool(body.background),
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": self._model,
            "output": [item.to_json(self._status_of(item, status)) for item in self._items]
            if is_done
            else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning and {"effort": body.reasoning.effort, "summary": None},
            "store": self._keep is not None,
            "temperature": params.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": choice.to_json() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.to_json() for tool in body.tools or ()],
            "top_logprobs": body.num_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_done else None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answer.group.usage()
        pictures = usage.prompt_tokens_details.image_tokens
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
                **({} if pictures is msgspec.UNSET else {"image_tokens": pictures}),
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": usage.total_tokens,
        }

    def _num_reasoning_tokens(self) -> int:
        """Tokenize the reasoning again: parts do not arrive token by token."""
        text = "".join(item.text for item in self._items if item.kind == "reasoning")
        tokens = self._answer.tokenizer.encode(text, add_special_tokens=False) if text else []
        # Retokenized text may have more tokens than were generated.
        return min(len(tokens), self._answer.group.num_tokens)
