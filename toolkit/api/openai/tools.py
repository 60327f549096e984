"""Tools: what a request says of them, and the messages that a model calls them with."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag

from toolkit.api.http.body_fields import Body, Text
from toolkit.api.openai.response_format import Schema
from toolkit.errors import InvalidRequestError


class FunctionTool(Body):
    name: Text = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: Text | None = None
    parameters: Schema | None = Field(
        None, description="JSON schema of the arguments; none: there are no arguments"
    )
    strict: bool | None = Field(
        None, description="Refuses a schema that cannot be held wholly, where the call is required"
    )


class Tool(Body):
    type: Literal["function"] = "function"
    function: FunctionTool


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolsChoice(Body):
    """Some of the tools, of which the answer may or has to call one."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(Body):
    name: Text
    arguments: Text = Field("{}", description="JSON")


class ToolCall(Body):
    """A call in an assistant's message, as it was told to the client."""

    id: Text
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With arguments as chat templates expect them: values, not text. Raises InvalidRequestError for no JSON."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(
                f"The arguments of the tool call {self.id!r} are no JSON: {error}", param="messages"
            ) from None
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }


WORD, NAMED, ALLOWED = Tag("(word)"), Tag("(named)"), Tag("(allowed)")
"""Mark what a choice may be, for BY_CHOICE: a word, a tool by its name, several that are allowed."""


def _kind_of_choice(value: Any) -> str:
    if not isinstance(value, dict | Body):
        return WORD.tag
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return ALLOWED.tag if kind == "allowed_tools" else NAMED.tag


BY_CHOICE = Discriminator(_kind_of_choice)
"""Chooses between them, so that what is wrong with one is not told as what another lacks."""
ChoiceWord = Literal["none", "auto", "required"]
ToolChoice = Annotated[
    Annotated[ChoiceWord, WORD]
    | Annotated[NamedTool, NAMED]
    | Annotated[AllowedToolsChoice, ALLOWED],
    BY_CHOICE,
]


class Function(msgspec.Struct, omit_defaults=True):
    """In a stream, a part of it."""

    name: str | None = None
    arguments: str | None = None


class ToolCallMessage(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A part of a call; the first has id, type and name."""

    index: int | None = None
    id: str | None = None
    type: str | None = None
    function: Function | None = None


def chosen_tools(tools: list[Tool] | None, choice: ToolChoice | None) -> list[Tool]:
    """The tools that an answer may call. Raises InvalidRequestError for a choice that there is not."""
    if not tools:
        if choice is not None and choice != "none":
            raise InvalidRequestError("tool_choice needs tools.", param="tool_choice")
        return []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequestError("Two tools have one name.", param="tools")
    if choice == "none":
        return []
    if isinstance(choice, NamedTool):
        return _named(tools, names, [choice])
    if isinstance(choice, AllowedToolsChoice):
        return _named(tools, names, choice.allowed_tools.tools)
    return tools


def has_to_call(choice: ToolChoice | None) -> bool:
    """Whether an answer with this choice is calls, and nothing else."""
    if isinstance(choice, AllowedToolsChoice):
        return choice.allowed_tools.mode == "required"
    return choice == "required" or isinstance(choice, NamedTool)


def _named(tools: list[Tool], names: list[str], chosen: list[NamedTool]) -> list[Tool]:
    """Raises InvalidRequestError for a name that no tool has, and for none."""
    wanted = [one.function.name for one in chosen]
    for name in wanted:
        if name not in names:
            raise InvalidRequestError(
                f"tool_choice names {name!r}, and the tools are {', '.join(names)}.",
                param="tool_choice",
            )
    if not wanted:
        raise InvalidRequestError("tool_choice allows no tool; none says so.", param="tool_choice")
    return [tool for tool in tools if tool.function.name in wanted]
