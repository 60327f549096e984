"""Parts of a chat answer (reasoning, content, tool calls): constrain the model, parse its text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from toolkit.api.openai.replies import AssistantMessage, ChatDelta
from toolkit.api.openai.tools import (
    FunctionCall,
    Tool,
    ToolCallDelta,
    ToolCallMessage,
    ToolUse,
)
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import (
    StructuredOutputsParams,
    choice_rule,
    prepared,
    regex_rule,
)
from toolkit.text.generic_tools import GenericFormat
from toolkit.text.parsers import Parsers
from toolkit.text.reasoning import Reasoning, ReasoningFormat
from toolkit.text.tokenizer import Tokenizer
from toolkit.text.tool_formats import ToolFormat, ToolText

if TYPE_CHECKING:
    from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """New text of an answer: reasoning, content or the arguments of a call.

    The first part of a call has its id and name."""

    kind: Literal["reasoning", "text", "call"]
    text: str
    id: str | None = None
    name: str | None = None
    index: int | None = None  # of the call
    begins: bool = False  # a call, or one of several messages


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """Parts that the answers to one request can have."""

    reasoning: Reasoning | None
    tool_format: type[ToolFormat] | None  # None: no calls. Harmony reports reasoning, too
    tools: list[Tool]
    allows_parallel: bool  # several calls in one answer
    needs_call: bool  # the answer is calls only
    has_named_tool: bool  # tool_choice names the tool to call
    reasoning_format: type[ReasoningFormat] = ReasoningFormat
    opening: str = ""  # text at the prompt's end that `tool_format` reads before the answer

    @classmethod
    def of(
        cls,
        use: ToolUse,
        template: str,
        prompt: list[int],
        tokenizer: Tokenizer,
        parsers: Parsers,
    ) -> AnswerPlan:
        """Raises InvalidRequestError if calls are not parsed, or the model would not see tools."""
        tools = use.tools
        harmony = parsers.harmony_for(template)
        tool_format: type[ToolFormat] | None = harmony
        if harmony is None and tools:
            tool_format = _choose_format(parsers, template, use.needs_call)
        return cls(
            parsers.reasoning_after(prompt, tokenizer),
            tool_format,
            tools,
            use.allows_parallel,
            use.needs_call,
            use.is_named,
            parsers.reasoning_format or ReasoningFormat,
            "" if tool_format is None else tool_format.opening_of(prompt, tokenizer),
        )

    @property
    def has_parts(self) -> bool:
        """True if an answer can have parts other than content."""
        return self.reasoning is not None or self.tool_format is not None

    def constrain(self, params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
        """Return `params` with the answer's grammar, keeping special tokens that mark its parts.

        Required calls drop stop strings and stop tokens: those are for text, and would cut
        arguments. Raises InvalidRequestError for constraints that exclude each other."""
        constraint = self._constraint(params.structured_outputs)
        if self.needs_call:
            params = msgspec.structs.replace(params, stop=[], stop_token_ids=[])
        marks = self.reasoning_format.start, self.reasoning_format.end
        markers = list(marks if self.reasoning is not None else ())
        markers += self.tool_format.markers if self.tool_format is not None else ()
        if constraint is not None:
            constraint = msgspec.structs.replace(
                constraint, reasoning=self.reasoning, reasoning_marks=marks, delimiters=markers
            )
        params = msgspec.structs.replace(params, structured_outputs=constraint)
        if not any(tokenizer.is_special_text(marker) for marker in markers):
            return params
        return msgspec.structs.replace(
            params, skip_special_tokens=False, spaces_between_special_tokens=False
        )

    def _constraint(self, asked: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        if self.tool_format is None:
            return asked
        answer_rule = None
        if self.needs_call:  # response_format is ignored: it constrains text, and there is none
            if asked is not None and asked.param == "structured_outputs":
                raise InvalidRequestError(
                    "tool_choice requires a tool call, so structured_outputs cannot apply. "
                    "Leave one of them out.",
                    param="tool_choice",
                )
        elif asked is None:
            return None
        else:
            answer_rule = _answer_rule(asked)
        param = "tools" if self.tools or asked is None else asked.param
        try:
            grammar = self.tool_format.answer_grammar(
                [tool.enforced() for tool in self.tools],
                parallel=self.allows_parallel,
                answer_rule=answer_rule,
                opening=self.opening,
            )
        except ValueError as error:
            raise InvalidParamError(param, f"{error}.") from None
        return StructuredOutputsParams(grammar=grammar, param=param)


class AnswerParser:
    """Splits the text of one answer into its parts as it arrives."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._reasoning = plan.reasoning_format(plan.reasoning)
        self._calls = None
        if plan.tool_format is not None:
            names = [tool.function.name for tool in plan.tools]
            self._calls = plan.tool_format(names, parallel=plan.allows_parallel)
            self._calls.add(plan.opening)
        self._has_content = not plan.needs_call
        self._has_named_tool = plan.has_named_tool
        self._seen: set[str] = set()  # kinds of parts so far

    def parts(
        self, text: str, reason: str | None = None, stop: int | str | None = None
    ) -> list[AnswerPart]:
        """Return what can be said now. Text that may still begin a marker is held back.

        `reason` and `stop`: the finish and stop reasons of the last text."""
        is_last = reason is not None
        reasoning, rest = self._reasoning.add(text, is_last=is_last)
        found = [AnswerPart("reasoning", reasoning)] if reasoning else []
        if self._calls is None:
            return [*found, AnswerPart("text", rest)] if rest else found
        new = self._calls.add(rest) if rest else []
        if is_last:
            is_cut = reason != "stop" or stop is not None  # it did not end with an end token
            new = _merge(new + self._calls.end(is_cut=is_cut))
        for one in new:
            if one.index is not None:
                id = None if one.name is None else self._calls.new_id()
                begins = id is not None
                found.append(AnswerPart("call", one.text, id, one.name, one.index, begins))
            elif one.is_reasoning:
                found.append(AnswerPart("reasoning", one.text, begins=one.begins_message))
            elif self._has_content:
                found.append(AnswerPart("text", one.text, begins=one.begins_message))
        return found

    def add(self, text: str, reason: str | None = None, stop: int | str | None = None) -> ChatDelta:
        """Return `parts` as a chat has them: messages of one kind are joined by empty lines."""
        texts: dict[str, list[str]] = {"reasoning": [], "text": []}
        calls = []
        for part in self.parts(text, reason, stop):
            if part.kind == "call":
                calls.append(_call_delta(part))
                continue
            if part.begins and part.kind in self._seen:
                texts[part.kind].append("\n\n")
            self._seen.add(part.kind)
            texts[part.kind].append(part.text)
        content, reasoning = "".join(texts["text"]), "".join(texts["reasoning"])
        return ChatDelta(
            content=content or None,
            reasoning_content=reasoning or None,
            reasoning=reasoning or None,
            tool_calls=calls or None,
        )

    def message(
        self, text: str, reason: str = "stop", stop: int | str | None = None
    ) -> AssistantMessage:
        """Return the message of an answer that has ended."""
        delta = self.add(text, reason, stop)
        message = AssistantMessage(
            "assistant", delta.content if delta.tool_calls else delta.content or ""
        )
        if delta.reasoning_content is not None:
            message.reasoning_content = message.reasoning = delta.reasoning_content
        if delta.tool_calls is not None:
            message.tool_calls = [
                ToolCallMessage(call.id or "", call.function or FunctionCall())
                for call in delta.tool_calls
            ]
        return message

    @property
    def has_complete_calls(self) -> bool:
        """True if the answer calls tools and no call's arguments are cut off."""
        return (
            self._calls is not None
            and self._calls.num_calls > 0
            and not self._calls.is_within_arguments
        )

    def finish_reason(self, reason: str) -> str:
        """Return "tool_calls" instead of "stop" for calls, unless the request named the tool."""
        is_call = self.has_complete_calls and not self._has_named_tool
        return "tool_calls" if is_call and reason == "stop" else reason


def _call_delta(part: AnswerPart) -> ToolCallDelta:
    if part.id is None:
        return ToolCallDelta(part.index, function=FunctionCall(arguments=part.text))
    return ToolCallDelta(part.index, part.id, "function", FunctionCall(part.name, part.text))


def _choose_format(parsers: Parsers, template: str, needs_call: bool) -> type[ToolFormat]:
    """Return the format of the model's calls. Raises InvalidRequestError if there is none."""
    found = parsers.tool_format_for(template)
    if not parsers.shows_tools(template):
        raise InvalidRequestError(
            "The model's chat template has no place for tools, so the model would not see them. "
            "--tool-call-parser auto (or generic) describes them in the system message; "
            "--chat-template sets another template.",
            param="tools",
        )
    if found is not None:
        return found
    if needs_call:
        return GenericFormat  # only JSON, which the grammar enforces on any model
    raise InvalidRequestError(
        "The server does not parse tool calls (--tool-call-parser none), so tool_choice must be "
        "none, required or a named tool.",
        param="tool_choice",
    )


def _answer_rule(asked: StructuredOutputsParams) -> str:
    """Return the right side of a Lark rule. Raises InvalidRequestError if there is none."""
    if asked.choice is not None:
        return choice_rule(asked.choice)
    if asked.regex is not None:
        return regex_rule(asked.regex)
    schema: Any = {"type": "object"} if asked.json_object else asked.json
    if schema is None:
        raise InvalidRequestError(
            f"{asked.param} cannot take a grammar or a structural tag with tools, nor with the "
            "messages of gpt-oss. Use json, json_object, regex or choice.",
            param=asked.param,
        )
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"The schema in structured_outputs is not JSON: {error}",
                param="structured_outputs",
            ) from None
        if not isinstance(schema, dict):
            raise InvalidRequestError(
                "With tools, the schema in structured_outputs must be a JSON object.",
                param="structured_outputs",
            )
    try:
        enforced = prepared(schema, lenient=asked.lenient)
    except ValueError as error:
        raise InvalidParamError(asked.param, f"{error}.") from None
    return f"%json {json.dumps(enforced, ensure_ascii=False)}"


def _merge(parts: list[ToolText]) -> list[ToolText]:
    """Join each part with those that continue it."""
    merged: list[ToolText] = []
    for part in parts:
        if merged and part.continues(merged[-1]):
            merged[-1].text += part.text
        else:
            merged.append(part)
    return merged
