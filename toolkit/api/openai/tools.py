"""Tools of a request, and the calls that a model makes."""

import json
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import BeforeValidator, Discriminator, Field, Tag

from toolkit.api.http.body_fields import Body, Text
from toolkit.api.openai.response_format import Schema
from toolkit.errors import InvalidRequestError
from toolkit.sampling.json_schema import prepare
from toolkit.text.tool_formats import arguments_object


class FunctionTool(Body):
    name: Text = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: Text | None = None
    parameters: Schema | None = Field(
        None, description="JSON schema of the arguments; default: no arguments"
    )
    strict: bool | None = Field(
        None,
        description="true: a required call has only the properties that the schema names; "
        "keywords that cannot be enforced are refused",
    )


class Tool(Body):
    type: Literal["function"] = "function"
    function: FunctionTool

    def enforced(self) -> Self:
        """Return the tool as a grammar enforces it. Raises ValueError if it cannot."""
        if self.function.parameters is None:
            return self
        schema = {"type": "object", **self.function.parameters}
        given = {"parameters": prepare(schema, lenient=not self.function.strict)}
        return self.model_copy(update={"function": self.function.model_copy(update=given)})


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
        """Return the call with parsed arguments, as chat templates expect them.

        Arguments that are not the JSON of an object, as when an answer was cut off, stay text."""
        text = arguments_object(self.function.arguments)
        try:
            arguments = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            arguments = text
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


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


def select_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """Return the tools that an answer may call. Raises InvalidRequestError for a bad choice."""
    if not tools:
        if choice is not None and choice != "none":
            raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
        return []
    names = [tool.function.name for tool in tools]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InvalidRequestError(f"tools has two functions named {twice!r}.", param="tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        return _select_named(tools, names, [choice])
    if isinstance(choice, AllowedToolsChoice):
        return _select_named(tools, names, choice.allowed_tools.tools)
    return tools


def requires_call(choice: ToolChoice | None) -> bool:
    """True if an answer with this choice is calls and nothing else."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _select_named(tools: list[Tool], names: list[str], chosen: list[NamedTool]) -> list[Tool]:
    """Raises InvalidRequestError for an unknown name, and for no name at all."""
    wanted = [one.function.name for one in chosen]
    for name in wanted:
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice names the unknown tool {name!r}. The tools are {', '.join(names)}.",
                param="tool_choice",
            )
    if not wanted:
        raise InvalidRequestError(
            "tool_choice allows no tool. To allow none, set it to none.", param="tool_choice"
        )
    return [tool for tool in tools if tool.function.name in wanted]
