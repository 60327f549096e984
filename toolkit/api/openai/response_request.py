"""Requests of /v1/responses, and their conversion to chat requests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, StrictBool, Tag, TypeAdapter

from toolkit.api.http.body_fields import (
    BY_KIND,
    FAIL_FAST,
    LIST,
    TEXT,
    Body,
    RequestBody,
    Text,
)
from toolkit.api.http.client_fields import REFUSED_IN_RESPONSES
from toolkit.api.openai.conversation import Conversation
from toolkit.api.openai.response_format import JsonSchemaFormat, constraint_of
from toolkit.api.openai.schemas import (
    DETAIL,
    MAX_MESSAGES,
    MAX_TOOLS,
    PROCESSOR_SETTINGS,
    Detail,
    ProcessorSettings,
    ReasoningEffort,
    answer_params,
    end_options,
    reasoning_options,
)
from toolkit.api.openai.tools import (
    ALLOWED,
    BY_CHOICE,
    MODE,
    NAMED,
    ChoiceMode,
    FunctionTool,
    Tool,
    ToolUse,
    only_type,
    template_call,
)
from toolkit.engine.front.feature_places import IMAGE, content_of, require_role
from toolkit.engine.front.pictures import PictureUrl
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.structured_outputs import StructuredOutputsParams

_LOGPROBS = "message.output_text.logprobs"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
_FROM_ANSWER = "Accepted as part of an earlier answer; not read"


# ---- the conversation


class InputPart(Body):
    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Text | None = None
    refusal: Text | None = None
    annotations: Any = Field(None, exclude=True, description=_FROM_ANSWER)
    logprobs: Any = Field(None, exclude=True, description=_FROM_ANSWER)


class InputImage(Body):
    """Picture, in messages of the user and in results of tool calls."""

    type: Literal["input_image"]
    image_url: Text | None = Field(
        None, description="data: URL with base64, or an http(s) or file URL if allowed"
    )
    detail: Detail | None = DETAIL
    file_id: Any = Field(None, description="Not supported: no files are stored")

    def to_url(self, place: str) -> PictureUrl:
        """`place`: the parameter of this part. Raises InvalidParamError."""
        if self.file_id is not None:
            raise InvalidParamError(
                f"{place}.file_id",
                "is not supported: this server stores no files. Send the picture as image_url.",
            )
        if self.image_url is None:
            raise InvalidParamError(f"{place}.image_url", "is missing.")
        return PictureUrl(self.image_url, f"{place}.image_url")


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"({'input_image' if kind == 'input_image' else 'text'})"


Content = Annotated[
    Annotated[Text, TEXT]
    | Annotated[
        list[
            Annotated[
                Annotated[InputPart, Tag("(text)")] | Annotated[InputImage, Tag("(input_image)")],
                Discriminator(_kind_of_part),
            ]
        ],
        FAIL_FAST,
        Field(max_length=MAX_MESSAGES),
        LIST,
    ],
    BY_KIND,
]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = Field(None, description=_FROM_ANSWER)
    status: str | None = Field(None, description=_FROM_ANSWER)
    phase: str | None = Field(None, description=_FROM_ANSWER)


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: Text


class InputReasoning(Body):
    """Reasoning of an earlier answer. The chat template decides whether the model sees it."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningPart] | None, FAIL_FAST, Field(max_length=MAX_MESSAGES)] = None
    id: str | None = Field(None, description=_FROM_ANSWER)
    summary: Any = Field(None, description=_FROM_ANSWER)
    status: str | None = Field(None, description=_FROM_ANSWER)
    encrypted_content: Any = Field(None, description="Not read: nothing is encrypted")

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class InputCall(Body):
    """Tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text = Field(description="JSON object")
    id: str | None = Field(None, description=_FROM_ANSWER)
    status: str | None = Field(None, description=_FROM_ANSWER)

    def to_template(self) -> dict[str, Any]:
        return template_call(self.call_id, self.name, self.arguments)


class InputCallOutput(Body):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: Text
    output: Content
    name: str | None = Field(None, description="Not read")
    id: str | None = Field(None, description="Not read")
    status: str | None = Field(None, description="Not read")


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}
ITEM_TYPES = ("message", "reasoning", "function_call", "function_call_output")


def _kind_of_item(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    return f"({kind if kind in ITEM_TYPES else 'message'})"


Item = Annotated[
    Annotated[InputMessage, Tag("(message)")]
    | Annotated[InputReasoning, Tag("(reasoning)")]
    | Annotated[InputCall, Tag("(function_call)")]
    | Annotated[InputCallOutput, Tag("(function_call_output)")],
    Discriminator(_kind_of_item),
]


def _check_item_types(items: Any) -> Any:
    """Name an unsupported type here: pydantic's error would list what each variant lacks."""
    for item in items if isinstance(items, list) else ():
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if isinstance(kind, str) and kind not in ITEM_TYPES:
            raise ValueError(
                f"Only items of the types {', '.join(ITEM_TYPES)} are supported, not {kind[:32]!a}"
            )
        for part in (*_list_field(item, "content"), *_list_field(item, "output")):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("input_file", "input_audio"):
                raise ValueError(f"Only text and pictures are supported as content, not {kind!r}")
    return items


def _list_field(item: Any, name: str) -> list[Any]:
    value = item.get(name) if isinstance(item, dict) else None
    return value if isinstance(value, list) else []


Input = Annotated[
    Annotated[Text, TEXT] | Annotated[list[Item], FAIL_FAST, Field(max_length=MAX_MESSAGES), LIST],
    BY_KIND,
    BeforeValidator(_check_item_types),
]


_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


def read_items(items: list[dict[str, Any]]) -> list[Item]:
    """Return items that this server has stored."""
    return _ITEMS.validate_python(items)


def stored_items(items: Sequence[Item], name: str) -> list[dict[str, Any]]:
    """Return items of an input as JSON, each with an id. `name`: of their response."""
    found = []
    for index, item in enumerate(items):
        one = {"type": item.type, **item.model_dump(exclude_unset=True, exclude_none=True)}
        if isinstance(item, InputMessage) and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            one["content"] = [{"type": kind, "text": item.content}]
        found.append(
            {"id": f"{_PREFIXES[item.type]}_{name}_in{index}", "status": "completed"} | one
        )
    return found


def _messages(items: list[Item]) -> list[dict[str, Any]]:
    """Convert items to chat messages.

    Calls join the assistant's message before them. Reasoning joins the message or call after it."""
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if isinstance(item, InputReasoning):
            thoughts += [item.text] if item.text else []
            continue
        if isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _content(item.content)})
        elif isinstance(item, InputCallOutput):
            messages.append(
                {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
            )
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(item.to_template())
        if thoughts and messages[-1]["role"] == "assistant":
            known = messages[-1].get("reasoning_content")
            messages[-1]["reasoning_content"] = "\n\n".join(filter(None, [known, *thoughts]))
        thoughts = []
    return messages


def _content(content: str | list[InputPart | InputImage]) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content
    return content_of(
        IMAGE if isinstance(part, InputImage) else part.text or part.refusal or ""
        for part in content
    )


def _pictures(items: Sequence[Item], name: str) -> Iterator[PictureUrl]:
    """Yield the pictures of items. `name`: their parameter. Raises InvalidParamError."""
    for index, item in enumerate(items):
        place, role = f"{name}[{index}].content", "tool"
        content: str | list[InputPart | InputImage] = []
        if isinstance(item, InputMessage):
            role, content = item.role, item.content
        elif isinstance(item, InputCallOutput):
            place, content = f"{name}[{index}].output", item.output
        for number, part in enumerate([] if isinstance(content, str) else content):
            if isinstance(part, InputImage):
                picture = part.to_url(f"{place}[{number}]")
                require_role(role, picture.param)
                yield picture


# ---- options


class TextFormat(JsonSchemaFormat):
    """Chat's `response_format`, with the fields of json_schema next to the type."""

    type: Literal["text", "json_object", "json_schema"] = "text"

    def to_json(self) -> dict[str, Any]:
        known = set(type(self).model_fields)
        return {"type": self.type} | self.model_dump(
            by_alias=True, exclude_unset=True, include=known
        )

    def to_params(self) -> StructuredOutputsParams | None:
        """Raises InvalidParamError if the type and the other fields do not belong together."""
        has_schema = len(self.to_json()) > 1 or self.type == "json_schema"
        schema = self if has_schema else None
        return constraint_of(self.type, schema, param="text.format")


class TextOptions(Body):
    format: TextFormat | None = Field(
        None, description="Constraint on the answer: text, json_object or json_schema"
    )


class ResponseTool(FunctionTool):
    """Chat's tool, with the fields of the function next to the type."""

    type: Literal["function"]

    def to_json(self) -> dict[str, Any]:
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict,
        }

    def plain(self) -> Tool:
        return Tool.of(self.name, self.description, self.parameters, self.strict)


class ResponseToolChoice(Body):
    type: Literal["function"]
    name: Text

    def to_json(self) -> dict[str, Any]:
        return {"type": "function", "name": self.name}


class ResponseAllowedTools(Body):
    """Choice among some of the tools: the answer may (auto) or must (required) call one."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[ResponseToolChoice]

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "mode": self.mode,
            "tools": [tool.to_json() for tool in self.tools],
        }


class ReasoningOptions(Body):
    effort: ReasoningEffort | None = Field(None, description="See chat's reasoning_effort")
    summary: Any = Field(None, description="Not read: reasoning is returned complete")
    generate_summary: Any = Field(None, description="Not read")
    context: Any = Field(None, description="Not read: earlier reasoning is not shown to the model")
    mode: Any = Field(None, description="Not read")


class ResponsesRequest(RequestBody):
    """POST /v1/responses."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"input": "What is a KV cache?", "max_output_tokens": 64}}
    )

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_RESPONSES

    model: str | None = None
    input: Input = Field(examples=["What is a KV cache?"])
    instructions: Text | None = Field(None, description="System message before the input")
    max_output_tokens: int | None = Field(None, description="Maximum tokens to generate")
    temperature: float | None = None
    top_p: float | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool] | None, only_type("function")] = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call"
    )
    tool_choice: (
        Annotated[
            Annotated[ChoiceMode, MODE]
            | Annotated[ResponseToolChoice, NAMED]
            | Annotated[ResponseAllowedTools, ALLOWED],
            BY_CHOICE,
        ]
        | None
    ) = Field(
        None,
        description="Default: auto. With required (also in allowed_tools) or a named function, "
        "the answer is calls with valid arguments",
    )
    parallel_tool_calls: StrictBool | None = Field(
        None, description="Allow several calls in one answer; default: true"
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: cut the beginning of an input that is too long"
    )
    stream: StrictBool = False
    stream_options: Any = Field(None, description="Not read")
    reasoning: ReasoningOptions | None = None
    include: Annotated[list[Include], FAIL_FAST] | None = Field(
        None,
        description=f"{_LOGPROBS}: report log-probabilities. The others have no effect: there are "
        "no hosted tools and no encrypted reasoning",
    )
    top_logprobs: int | None = Field(
        None, description="Report log-probabilities, with so many likeliest tokens at each position"
    )
    previous_response_id: Text | None = Field(
        None, description="Stored response whose conversation the input continues"
    )
    background: StrictBool | None = Field(
        None, description="Answer at once, with the status in_progress; GET returns the result"
    )
    mm_processor_kwargs: ProcessorSettings | None = PROCESSOR_SETTINGS
    image: Any = Field(None, description="Not read: pictures are parts of the input")
    store: StrictBool | None = Field(
        None, description="Keep the response for later requests; default: true"
    )
    metadata: dict[Text, Text] | None = None
    user: Text | None = None

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return {
            "prompt": "input",
            "logprobs": "top_logprobs",
            "max_tokens": "max_output_tokens",
            "reasoning_effort": "reasoning.effort",
            "truncate_prompt_tokens": "truncation",
        }

    @property
    def items(self) -> list[Item]:
        """The input. A text is a message of the user."""
        if isinstance(self.input, str):
            return [InputMessage.model_validate({"role": "user", "content": self.input})]
        return self.input

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to report at each position; None: no log-probabilities."""
        if self.top_logprobs is None and _LOGPROBS not in (self.include or ()):
            return None
        return self.top_logprobs or 0

    def to_conversation(
        self, defaults: Mapping[str, Any], earlier: Sequence[Item] = ()
    ) -> Conversation:
        """`defaults`: of sampling. `earlier`: items before the input.

        Raises InvalidRequestError for unsupported options."""
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if len(earlier) + len(self.items) > MAX_MESSAGES:
            raise InvalidRequestError(
                f"The conversation has {len(earlier) + len(self.items)} items, of at most "
                f"{MAX_MESSAGES}.",
                param="previous_response_id",
            )
        messages += _messages([*earlier, *self.items])
        if not messages:
            raise InvalidRequestError("The conversation has no messages.", param="input")
        text_format = None if self.text is None else self.text.format
        params = answer_params(
            defaults,
            self.max_output_tokens,
            {
                "temperature": self.temperature,
                "top_p": self.top_p,
                "truncate_prompt_tokens": -1 if self.truncation == "auto" else None,
            },
            logprobs=self.num_logprobs,
            structured_outputs=None if text_format is None else text_format.to_params(),
        )
        effort = None if self.reasoning is None else self.reasoning.effort
        return Conversation(
            messages=messages,
            pictures=[
                *_pictures(earlier, "previous_response_id"),
                *_pictures(self.items, "input"),
            ],
            options=reasoning_options(effort) | end_options(),
            tools=self._tool_use(),
            params=params,
        )

    def _tool_use(self) -> ToolUse:
        choice, names = self.tool_choice, None
        mode = choice if isinstance(choice, str) else None
        if isinstance(choice, ResponseToolChoice):
            mode, names = "required", [choice.name]
        elif isinstance(choice, ResponseAllowedTools):
            mode, names = choice.mode, [tool.name for tool in choice.tools]
        elif not self.tools and mode == "auto":
            mode = None  # the official client sends it with every request
        return ToolUse.choose(
            [tool.plain() for tool in self.tools or ()],
            mode,
            names,
            is_named=isinstance(choice, ResponseToolChoice),
            parallel=self.parallel_tool_calls is not False,
        )
