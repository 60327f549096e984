"""A chat answer in its parts: reasoning, content, calls of tools. What the model is held to, and how its text is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from toolkit.api.openai.replies import AssistantMessage, ChatDelta
from toolkit.api.openai.schemas import ChatRequest
from toolkit.api.openai.tools import (
    Function,
    NamedTool,
    Tool,
    ToolCallDelta,
    ToolCallMessage,
    has_to_call,
)
from toolkit.config import ServerConfig
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams
from toolkit.text.reasoning import (
    END_OF_THINKING,
    THINK,
    Reasoning,
    ReasoningSplitter,
    reasoning_after,
)
from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import FORMATS, Llama3, Piece, ToolFormat, detect, held_to_calls

if TYPE_CHECKING:
    from typing import Any


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """What the parts of the answers to one request are."""

    reasoning: Reasoning | None
    form: type[ToolFormat] | None
    """How calls are written; None: there are none."""
    tools: list[Tool]
    parallel: bool
    forced: bool
    """Whether the answer has to be calls."""
    named: bool
    """Whether the request says which tool is called."""

    @classmethod
    def of(
        cls, body: ChatRequest, prompt: list[int], tokenizer: Tokenizer, config: ServerConfig
    ) -> AnswerPlan:
        """Raises InvalidRequestError for tools whose calls could not be told from text."""
        tools = body.callable_tools
        forced = has_to_call(body.tool_choice)
        parser = None if config.reasoning_parser == "none" else config.reasoning_parser
        return cls(
            reasoning_after(prompt, tokenizer, parser),
            _form(config.tool_call_parser, body, tokenizer, forced=forced) if tools else None,
            tools,
            body.parallel_tool_calls and not isinstance(body.tool_choice, NamedTool),
            forced,
            isinstance(body.tool_choice, NamedTool),
        )

    @property
    def splits(self) -> bool:
        """Whether an answer can have other parts than content."""
        return self.reasoning is not None or self.form is not None

    def params(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """With what the answer is held to, and the marks of its parts in its text. Raises InvalidRequestError for forms
        that exclude each other.

        An answer that has to be calls ends with them: stop strings and stop tokens are for text, and would cut arguments.
        """
        form = self._held_to(params.structured_outputs)
        if self.forced:
            params = msgspec.structs.replace(params, stop=[], stop_token_ids=[])
        if form is not None and self.reasoning is not None:
            form = msgspec.structs.replace(form, reasoning=self.reasoning)
        marks = [THINK, END_OF_THINKING] if self.reasoning is not None else []
        marks += self.form.marks if self.form is not None else ()
        hidden = any(tokenizer.is_special_text(mark) for mark in marks)
        return msgspec.structs.replace(
            params,
            structured_outputs=form,
            skip_special_tokens=params.skip_special_tokens and not hidden,
        )

    def parser(self) -> AnswerParser:
        """Reads one answer."""
        return AnswerParser(self)

    def _held_to(self, asked: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        if self.forced and asked is not None and asked.param == "response_format":
            asked = None  # there is no text that could have this form
        if self.form is None or (asked is None and not self.forced):
            return asked
        answer = None
        if asked is not None:
            if self.forced:
                raise InvalidRequestError(
                    "The answer has to be a call of a tool, so that structured_outputs cannot be held.",
                    param="tool_choice",
                )
            answer = _right_side(asked)
        grammar = held_to_calls(self.form, self.tools, parallel=self.parallel, answer=answer)
        return StructuredOutputsParams(grammar=grammar, param="tools")


class AnswerParser:
    """Reads one answer as it comes."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._reasoning = ReasoningSplitter(plan.reasoning)
        names = [tool.function.name for tool in plan.tools]
        self._calls = None if plan.form is None else plan.form(names, parallel=plan.parallel)
        self._named = plan.named

    def add(self, text: str, *, ended: bool) -> ChatDelta:
        """What more text makes certain; `ended`: no more comes."""
        reasoning, rest = self._reasoning.add(text, ended=ended)
        if self._calls is None:
            return ChatDelta(content=rest or None, reasoning_content=reasoning or None)
        pieces = self._calls.add(rest) if rest else []
        if ended:
            pieces = _joined(pieces + self._calls.end())
        content = "".join(piece.text for piece in pieces if piece.index is None)
        calls = [self._call(piece) for piece in pieces if piece.index is not None]
        return ChatDelta(
            content=content or None, reasoning_content=reasoning or None, tool_calls=calls or None
        )

    def message(self, text: str) -> AssistantMessage:
        """A whole answer."""
        delta = self.add(text, ended=True)
        message = AssistantMessage(
            "assistant", delta.content if delta.tool_calls else delta.content or ""
        )
        if delta.reasoning_content is not None:
            message.reasoning_content = delta.reasoning_content
        if delta.tool_calls is not None:
            message.tool_calls = [_whole(call) for call in delta.tool_calls]
        return message

    @property
    def called(self) -> bool:
        """Whether the answer calls tools, and its end has not cut a call's arguments."""
        return (
            self._calls is not None
            and self._calls.num_calls > 0
            and not self._calls.within_arguments
        )

    def finish_reason(self, reason: str) -> str:
        """A call that the request did not name is a reason of its own."""
        return "tool_calls" if self.called and reason == "stop" and not self._named else reason

    def _call(self, piece: Piece) -> ToolCallDelta:
        if piece.name is None or self._calls is None:
            return ToolCallDelta(piece.index, function=Function(arguments=piece.text))
        return ToolCallDelta(
            piece.index, self._calls.new_id(), "function", Function(piece.name, piece.text)
        )


def _form(asked: str, body: ChatRequest, tokenizer: Tokenizer, *, forced: bool) -> type[ToolFormat]:
    """How the model writes calls. Raises InvalidRequestError when nobody knows, or its prompt has no tools."""
    template = tokenizer.chat_template_text if body.chat_template is None else body.chat_template
    if "tools" not in template:
        raise InvalidRequestError(
            "The model's chat template has no place for tools, so that the model would not know of them; --chat-template "
            "sets another.",
            param="tools",
        )
    name = detect(template) if asked == "auto" else asked
    if name in FORMATS:
        return FORMATS[name]
    if forced:
        return Llama3  # JSON and nothing else, which the grammar holds the model to
    raise InvalidRequestError(
        "The server does not know how this model writes calls of tools, so that tool_choice is none, required or a "
        "named tool; --tool-call-parser tells it.",
        param="tool_choice",
    )


def _right_side(asked: StructuredOutputsParams) -> str:
    """What is asked of an answer, within a Lark grammar. Raises InvalidRequestError for what does not go there."""
    if asked.choice is not None:
        return " | ".join(json.dumps(choice) for choice in asked.choice)
    schema: Any = {"type": "object"} if asked.json_object else asked.json
    if schema is None:
        raise InvalidRequestError(
            "With tools, structured_outputs takes json, json_object or choice; or tool_choice is none.",
            param="structured_outputs",
        )
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"The schema in structured_outputs is no JSON: {error}", param="structured_outputs"
            ) from None
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                "With tools, the schema in structured_outputs is a JSON object.",
                param="structured_outputs",
            )
    options = {"lenient": asked.lenient, "coerce_one_of": asked.lenient}
    return f"%json {json.dumps({**schema, 'x-guidance': options}, ensure_ascii=False)}"


def _joined(pieces: list[Piece]) -> list[Piece]:
    """With what follows the piece that it belongs to."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].index == piece.index and piece.name is None:
            joined[-1].text += piece.text
        else:
            joined.append(piece)
    return joined


def _whole(call: ToolCallDelta) -> ToolCallMessage:
    return ToolCallMessage(call.id or "", call.function or Function())
