"""A response on its way: its items, whole or as events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from toolkit.api.http.body_fields import Body
from toolkit.api.http.error_bodies import error_detail
from toolkit.api.openai.conversation import Piece, Talk
from toolkit.api.openai.response_request import ResponsesRequest

_encoder = msgspec.json.Encoder()
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


class _Item:
    """A part of the output: the model's reasoning, its message, or a call. `begin`: the first piece of it."""

    def __init__(self, begin: Piece, name: str, index: int) -> None:
        self.kind, self.index = begin.kind, index
        self.id = f"{_PREFIXES[begin.kind]}_{name}_{index}"
        self.texts: list[str] = []
        self._call = {"call_id": begin.id, "name": begin.name}

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def part_type(self) -> str:
        """Of its one part; calls have none."""
        return "reasoning_text" if self.kind == "reasoning" else "output_text"

    @property
    def no_logprobs(self) -> dict[str, Any]:
        """Output text has a place for them."""
        return {"logprobs": []} if self.kind == "text" else {}

    def part(self, text: str) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.part_type, "text": text}
        return part if self.kind == "reasoning" else part | {"annotations": [], "logprobs": []}

    def shown(self, status: str) -> dict[str, Any]:
        if self.kind == "call":
            head = {"id": self.id, "type": "function_call", "status": status}
            return head | self._call | {"arguments": self.text}
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


class Answer:
    """One response."""

    def __init__(self, body: ResponsesRequest, talk: Talk, name: str, model: str) -> None:
        self._body, self._talk, self._name, self._model = body, talk, name, model
        self._created = int(time.time())
        self._items: list[_Item] = []
        self._num_events = 0

    async def collect(self) -> dict[str, Any]:
        """All of it. Raises EngineError."""
        async for piece in self._talk.pieces():
            if self._begins_item(piece):
                self._add_item(piece)
            self._items[-1].texts.append(piece.text)
        if self._lacks_message:
            self._add_item(Piece("text", ""))
        return self._response(self._status())

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The same as server-sent events. Raises EngineError."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))
        async for piece in self._talk.pieces():
            for event in self._enter(piece):
                yield event
            item = self._items[-1]
            item.texts.append(piece.text)
            if item.kind != "call":
                yield self._part_event(
                    f"response.{item.part_type}.delta", delta=piece.text, **item.no_logprobs
                )
            elif piece.text:
                yield self._item_event("response.function_call_arguments.delta", delta=piece.text)
        if self._lacks_message:
            for event in self._enter(Piece("text", "")):
                yield event
        status = self._status()
        for event in self._leave(self._status_of(self._items[-1], status)):
            yield event
        name = "completed" if status == "completed" else "incomplete"
        yield self._event(f"response.{name}", response=self._response(status))

    def error_event(self, error: Exception) -> bytes:
        """What a client of a stream gets when the answer cannot be finished."""
        detail = error_detail(error)
        return self._event("error", code=detail.code, message=detail.message, param=detail.param)

    # ---- items

    @property
    def _lacks_message(self) -> bool:
        """An answer ends with a message or with calls, be the message empty."""
        return not self._items or self._items[-1].kind == "reasoning"

    def _begins_item(self, piece: Piece) -> bool:
        return not self._items or self._items[-1].kind != piece.kind or piece.id is not None

    def _add_item(self, begin: Piece) -> _Item:
        self._items.append(_Item(begin, self._name, len(self._items)))
        return self._items[-1]

    def _enter(self, piece: Piece) -> Sequence[bytes]:
        """What is told when an item begins with a piece, if one does."""
        if not self._begins_item(piece):
            return ()
        before = self._leave("completed") if self._items else []
        item = self._add_item(piece)
        added = [
            self._event(
                "response.output_item.added",
                output_index=item.index,
                item=item.shown("in_progress"),
            )
        ]
        if item.kind != "call":
            added.append(self._part_event("response.content_part.added", part=item.part("")))
        return [*before, *added]

    def _leave(self, status: str) -> list[bytes]:
        item = self._items[-1]
        if item.kind == "call":
            done = [
                self._item_event("response.function_call_arguments.done", **self._call_done(item))
            ]
        else:
            done = [
                self._part_event(
                    f"response.{item.part_type}.done", text=item.text, **item.no_logprobs
                ),
                self._part_event("response.content_part.done", part=item.part(item.text)),
            ]
        return [
            *done,
            self._event(
                "response.output_item.done", output_index=item.index, item=item.shown(status)
            ),
        ]

    def _call_done(self, item: _Item) -> dict[str, Any]:
        call = item.shown("completed")
        return {"name": call["name"], "arguments": call["arguments"]}

    # ---- events

    def _part_event(self, type: str, **more: Any) -> bytes:
        return self._item_event(type, content_index=0, **more)

    def _item_event(self, type: str, **more: Any) -> bytes:
        item = self._items[-1]
        return self._event(type, item_id=item.id, output_index=item.index, **more)

    def _event(self, type: str, **more: Any) -> bytes:
        content = {"type": type, "sequence_number": self._num_events} | more
        self._num_events += 1
        return b"event: " + type.encode() + b"\ndata: " + _encoder.encode(content) + b"\n\n"

    # ---- the response

    def _status(self) -> str:
        return "completed" if self._talk.finish_reason in ("stop", "tool_calls") else "incomplete"

    def _status_of(self, item: _Item, status: str) -> str:
        """All items but the last are whole."""
        if item is not self._items[-1]:
            return "completed"
        return "incomplete" if item.kind == "call" and not self._talk.calls else status

    def _response(self, status: str) -> dict[str, Any]:
        body, params = self._body, self._talk.params
        is_done = status != "in_progress"
        text = body.text.format.shown() if body.text is not None and body.text.format else None
        finished = self._talk.finish_reason
        reason = "max_output_tokens" if finished == "length" else finished
        choice = body.tool_choice
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
            "output": [item.shown(self._status_of(item, status)) for item in self._items]
            if is_done
            else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": text or {"type": "text"}},
            "tool_choice": choice.shown() if isinstance(choice, Body) else choice or "auto",
            "tools": [tool.shown() for tool in body.tools or ()],
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_done else None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._talk.group.usage()
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.prompt_tokens_details.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens()},
            "total_tokens": usage.total_tokens,
        }

    def _num_reasoning_tokens(self) -> int:
        """By its text: pieces do not come token by token. Whatever that gives, never more than there were."""
        text = "".join(item.text for item in self._items if item.kind == "reasoning")
        tokens = self._talk.tokenizer.encode(text, add_special_tokens=False) if text else []
        return min(len(tokens), self._talk.group.num_tokens)
