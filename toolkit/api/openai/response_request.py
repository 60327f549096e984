"""What a client of /v1/responses sends, and the chat request that says the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from toolkit.api.http.body_fields import (
    BY_KIND,
    LIST,
    TEXT,
    TO_FIRST_MISTAKE,
    Body,
    Text,
    WholeBody,
)
from toolkit.api.openai.conversation import as_chat
from toolkit.api.openai.response_format import JsonSchemaFormat
from toolkit.api.openai.schemas import MAX_MESSAGES, MAX_TOOLS, ChatRequest
from toolkit.api.openai.tools import ALLOWED, BY_CHOICE, NAMED, WORD, ChoiceWord, FunctionTool
from toolkit.errors import InvalidRequestError

# ---- the conversation


class InputPart(Body):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: Any = Field(None, exclude=True, description="Of an earlier answer; not read")
    logprobs: Any = Field(None, exclude=True, description="Of an earlier answer; not read")


Content = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[InputPart], TO_FIRST_MISTAKE, Field(max_length=MAX_MESSAGES), LIST],
    BY_KIND,
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = Field(None, description="Of an earlier answer; not read")
    status: str | None = Field(None, description="Of an earlier answer; not read")
    phase: str | None = Field(None, description="Of an earlier answer; not read")


class InputReasoning(Body):
    """What a model thought before an earlier answer: it is not given to it again."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Any = None
    content: Any = None
    status: str | None = None
    encrypted_content: Any = None


class InputCall(Body):
    """A call of a tool, in an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text = Field(description="JSON")
    id: str | None = Field(None, description="Not read")
    status: str | None = Field(None, description="Not read")

    def for_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class InputCallOutput(Body):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    id: str | None = Field(None, description="Not read")
    status: str | None = Field(None, description="Not read")


KINDS = ("message", "reasoning", "function_call", "function_call_output")


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return f"({kind if kind in KINDS else 'message'})"


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputReasoning, Tag("(reasoning)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputCallOutput, Tag("(function_call_output)")],
    Discriminator(_kind_of_item),
]


def _only_known(items: Any) -> Any:
    """Says what is not taken, before the kinds that are complain one by one."""
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in KINDS:
            raise ValueError(
                f"Items are of the types {', '.join(KINDS)} here; got one of type {kind[:32]!a}"
            )
        for part in (*_listed(item, "content"), *_listed(item, "output")):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("input_image", "input_file", "input_audio"):
                raise ValueError(f"Content is text here; got {kind!r}")
    return items


def _listed(item: Any, name: str) -> list[Any]:
    found = item.get(name) if isinstance(item, dict) else None
    return found if isinstance(found, list) else []


Input = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[Item], TO_FIRST_MISTAKE, Field(max_length=MAX_MESSAGES), LIST],
    BY_KIND,
    BeforeValidator(_only_known),
]


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """The same as messages of a chat: calls are a part of the assistant's message that they come with."""
    messages: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, InputCallOutput):
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            )
        elif isinstance(item, InputCall):
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(item.for_chat())
    return messages


def _text(content: str | list[InputPart]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.text or part.refusal or "" for part in content)


# ---- what is asked of the answer


class TextFormat(JsonSchemaFormat):
    """As chat's `response_format`, with the schema beside the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def shown(self) -> dict[str, Any]:
        """As it was given, without what nobody reads."""
        known = set(type(self).model_fields)
        return {"type": self.type} | self.model_dump(
            by_alias=True, exclude_unset=True, include=known
        )

    def for_chat(self) -> dict[str, Any]:
        """With the schema in a table of its own."""
        schema = {name: value for name, value in self.shown().items() if name != "type"}
        if not schema and self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": schema}


class TextOptions(Body):
    format: TextFormat | None = Field(None, description="text, json_object or json_schema")


class ResponseTool(FunctionTool):
    """As a chat's tool, with what it has of its function beside the type."""

    type: Literal["function"]

    def shown(self) -> dict[str, Any]:
        """As it was given, without what nobody reads."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }

    def for_chat(self) -> dict[str, Any]:
        """With the function in a table of its own."""
        function = {
            name: value
            for name, value in self.shown().items()
            if name != "type" and value is not None
        }
        return {"type": "function", "function": function}


class ResponseToolChoice(Body):
    type: Literal["function"]
    name: Text

    def for_chat(self) -> dict[str, Any]:
        """With the name in a table of its own."""
        return {"type": "function", "function": {"name": self.name}}

    def shown(self) -> dict[str, Any]:
        """As it was given, without what nobody reads."""
        return {"type": "function", "name": self.name}


class ResponseAllowedTools(Body):
    """Some of the tools, of which the answer may or has to call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoice]

    def shown(self) -> dict[str, Any]:
        """As it was given, without what nobody reads."""
        return {
            "type": self.type,
            "mode": self.mode,
            "tools": [tool.shown() for tool in self.tools],
        }


def _only_functions(tools: Any) -> Any:
    """Says which kind of tool is not there."""
    for tool in tools if isinstance(tools, list) else ():
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind != "function":
            raise ValueError(
                f"Tools are functions of the client here (type 'function'); got one of type {kind[:32]!a}"
            )
    return tools


class ResponsesRequest(WholeBody):
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
    tools: Annotated[list[ResponseTool] | None, BeforeValidator(_only_functions)] = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call"
    )
    tool_choice: (
        Annotated[
            Annotated[ChoiceWord, WORD]
            | Annotated[ResponseToolChoice, NAMED]
            | Annotated[ResponseAllowedTools, ALLOWED],
            BY_CHOICE,
        ]
        | None
    ) = Field(
        None,
        description="Default: auto. required, also of allowed_tools, and a named function hold the answer to calls with valid "
        "arguments",
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may have several calls; default: true"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: an input that is too long loses its beginning"
    )
    stream: bool = False
    store: bool | None = Field(None, description="Only false: nothing is stored")
    metadata: dict[Text, Text] | None = None
    user: Text | None = None
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
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        said = (
            [{"role": "user", "content": self.input}]
            if isinstance(self.input, str)
            else _messages(self.input)
        )
        return as_chat(
            messages=messages + said,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[tool.for_chat() for tool in self.tools] if self.tools else None,
            tool_choice=self._choice(),
            parallel_tool_calls=self.parallel_tool_calls,
            truncate_prompt_tokens=-1 if self.truncation == "auto" else None,
            response_format=self.text.format.for_chat()
            if self.text is not None and self.text.format
            else None,
        )

    def _choice(self) -> str | dict[str, Any] | None:
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            return choice.for_chat()
        if isinstance(choice, ResponseAllowedTools):
            allowed = {"mode": choice.mode, "tools": [tool.for_chat() for tool in choice.tools]}
            return {"type": choice.type, "allowed_tools": allowed}
        return choice if self.tools or choice == "required" else None
