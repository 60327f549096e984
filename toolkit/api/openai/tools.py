"""Tools of a request, and the calls that a model makes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, StrictBool, Tag

from toolkit.api.http.body_fields import Body, Text
from toolkit.api.openai.response_format import Schema
from toolkit.errors import InvalidRequestError
from toolkit.sampling.json_schema import prepare
from toolkit.text.tool_formats import arguments_object


@dataclass(frozen=True, slots=True)
class Function:
    """A function that an answer may call."""

    name: str
    parameters: dict[str, Any] | None = None  # JSON schema of the arguments
    strict: bool | None = None  # a required call has only what the schema names


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool of a conversation."""

    function: Function
    given: dict[str, Any] = field(default_factory=dict)  # as chat templates take it

    @classmethod
    def of(cls, name: str, description: str | None, parameters: Any, strict: bool | None) -> Tool:
        """Return the tool of a function whose request is not in the format of chats."""
        given = {"name": name, "description": description, "parameters": parameters}
        given |= {"strict": strict}
        shown = {key: value for key, value in given.items() if value is not None}
        return cls(Function(name, parameters, strict), {"type": "function", "function": shown})

    def enforced(self) -> Tool:
        """Return the tool as a grammar enforces it. Raises ValueError if it cannot."""
        if self.function.parameters is None:
            return self
        schema = {"type": "object", **self.function.parameters}
        prepared = prepare(schema, lenient=not self.function.strict)
        return replace(self, function=replace(self.function, parameters=prepared))


ToolName = Annotated[Text, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class FunctionTool(Body):
    name: ToolName
    description: Text | None = None
    parameters: Schema | None = Field(
        None, description="JSON schema of the arguments; default: no arguments"
    )
    strict: StrictBool | None = Field(
        None,
        description="true: a required call has only the properties that the schema names; "
        "keywords that cannot be enforced are refused",
    )


class ChatTool(Body):
    type: Literal["function"] = "function"
    function: FunctionTool

    def plain(self) -> Tool:
        one = self.function
        given = self.model_dump(exclude_none=True, by_alias=True)
        return Tool(Function(one.name, one.parameters, one.strict), given)


def only_type(supported: str) -> BeforeValidator:
    """Return a validator of tools that names an unsupported type: pydantic's error would not."""

    def check(tools: Any) -> Any:
        for tool in tools if isinstance(tools, list) else ():
            kind = tool.get("type") if isinstance(tool, dict) else None
            if isinstance(kind, str) and kind != supported:
                raise ValueError(
                    f"Only tools of type {supported!r} are supported, not {kind[:32]!a}"
                )
        return tools

    return BeforeValidator(check)


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(Body):
    """Choice among some of the tools: the answer may (auto) or must (required) call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Body):
    name: Text
    arguments: Text = Field("{}", description="JSON")


class ToolCall(Body):
    """Tool call in an assistant's message, as a reply returned it."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def to_template(self) -> dict[str, Any]:
        return template_call(self.id, self.function.name, self.function.arguments)


def template_call(id: str, name: str, arguments: str | dict[str, Any]) -> dict[str, Any]:
    """Return a call of an earlier answer, as chat templates expect it: with parsed arguments.

    Text that is not the JSON of an object, as when an answer was cut off, stays text."""
    if isinstance(arguments, str):
        text = arguments_object(arguments)
        try:
            arguments = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            arguments = text
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def parse_arguments(text: str) -> Any:
    """Return the arguments of an answer's call; empty for a call that was cut off."""
    try:
        return msgspec.json.decode(text or b"{}")
    except msgspec.DecodeError:
        return {}


MODE, NAMED, ALLOWED = Tag("(mode)"), Tag("(named)"), Tag("(allowed)")
"""Variants of a tool choice, for BY_CHOICE: a mode, one tool by its name, several allowed tools."""


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict | Body):
        return MODE.tag
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ALLOWED.tag if kind == "allowed_tools" else NAMED.tag


BY_CHOICE = Discriminator(_kind_of_choice)
"""Picks the variant, so that an error concerns the variant the client meant."""
ChoiceMode = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ChoiceMode, MODE]
    | Annotated[NamedTool, NAMED]
    | Annotated[AllowedToolsChoice, ALLOWED],
    BY_CHOICE,
]


class FunctionCall(msgspec.Struct, omit_defaults=True):
    """Called function of a reply; in a stream, a part of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCallMessage(msgspec.Struct):
    id: str
    function: FunctionCall
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """Part of a call. The first part has id, type and name."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: FunctionCall | None = None


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that an answer may call, and whether it must."""

    tools: list[Tool] = field(default_factory=list)
    needs_call: bool = False  # the answer is calls and nothing else
    is_named: bool = False  # the request names the tool to call
    allows_parallel: bool = True  # several calls in one answer

    @classmethod
    def choose(
        cls,
        tools: list[Tool],
        mode: str | None,
        names: list[str] | None = None,
        *,
        is_named: bool = False,
        parallel: bool = True,
    ) -> ToolUse:
        """Apply a request's choice: `mode` is auto, required or none, and `names` allow some tools.

        Raises InvalidRequestError for a choice that does not match the tools."""
        if not tools:
            if mode is not None and mode != "none":
                raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
            return cls(allows_parallel=parallel)
        known = [tool.function.name for tool in tools]
        if twice := next((name for name in known if known.count(name) > 1), None):
            raise InvalidRequestError(f"tools has two functions named {twice!r}.", param="tools")
        if mode == "none":
            return cls(allows_parallel=parallel)
        if names is not None:
            tools = _allowed(tools, known, names)
        return cls(tools, mode == "required", is_named, parallel and not is_named)


def _allowed(tools: list[Tool], known: list[str], wanted: list[str]) -> list[Tool]:
    """Raises InvalidRequestError for an unknown name, and for no name at all."""
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise InvalidRequestError(
            f"tool_choice names the unknown tool {unknown!r}. The tools are {', '.join(known)}.",
            param="tool_choice",
        )
    if not wanted:
        raise InvalidRequestError(
            "tool_choice allows no tool. To allow none, set it to none.", param="tool_choice"
        )
    return [tool for tool in tools if tool.function.name in wanted]
