"""Ollama's requests for chats and texts, as pydantic models."""

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)

from toolkit.api.http.body_fields import FAIL_FAST, Body, RequestBody, Text
from toolkit.api.http.client_fields import REFUSED_BY_OLLAMA_GENERATE
from toolkit.api.http.wrong_values import describe
from toolkit.api.ollama.options import OPTION_NAMES, ModelOptions
from toolkit.api.openai.conversation import Conversation
from toolkit.api.openai.response_format import Schema
from toolkit.api.openai.schemas import MAX_MESSAGES, MAX_TOOLS, end_options, reasoning_options
from toolkit.api.openai.tools import ChatTool, ToolUse, only_type, template_call
from toolkit.engine.front.feature_places import IMAGE, content_of, require_role
from toolkit.engine.front.pictures import PictureUrl
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.structured_outputs import StructuredOutputsParams

Effort = Literal["low", "medium", "high", "max"]
EncodedPictures = Annotated[list[Text], FAIL_FAST, Field(max_length=MAX_MESSAGES)]
_NO_TIME = re.compile(r"[-+]?0*(?:0|0\.0*|\.0+)(?:ns|us|µs|ms|s|m|h)?")


def _name_option(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
    """Name the wrong option: an error of the request names only `options`."""
    try:
        return validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = next(iter(first["loc"]), None)
        problem = describe(first)
        joint = " " if problem.startswith("must ") else ": "
        raise ValueError(problem if name is None else f"{name}{joint}{problem}") from None


def _check_format(value: Any) -> Any:
    """Name the formats here: pydantic's error would be about each variant."""
    if value is not None and value not in ("", "json") and not isinstance(value, dict):
        raise ValueError("must be 'json' or a JSON schema")
    return value


class OllamaRequest(RequestBody):
    """Fields of all requests that name a model."""

    model: str | None = Field(None, description="With or without :latest; may be left out")
    options: Annotated[ModelOptions | None, WrapValidator(_name_option)] = None
    keep_alive: float | str | None = Field(
        None, description="Not read: the model stays loaded. 0 is answered as unloading is"
    )

    @property
    def is_unload(self) -> bool:
        """True if the client wants the model to be unloaded."""
        given = self.keep_alive
        if isinstance(given, str):
            return _NO_TIME.fullmatch(given.strip()) is not None
        return given == 0


class AnswerRequest(OllamaRequest):
    """Fields of requests for an answer."""

    stream: StrictBool = True
    format: Annotated[Literal["", "json"] | Schema | None, BeforeValidator(_check_format)] = Field(
        None, description="Constraint on the answer: json, or a JSON schema"
    )
    think: StrictBool | Effort | None = Field(
        None,
        description="Sets enable_thinking, or reasoning_effort, for chat templates that read it",
    )
    logprobs: StrictBool | None = Field(
        None, description="Report the log-probability of each token"
    )
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="Likeliest tokens to report, too; needs logprobs"
    )
    truncate: Any = Field(None, description="Not read: a prompt that is too long is an error")
    shift: Any = Field(None, description="Not read: an answer ends with the context")

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return OPTION_NAMES | {"reasoning_effort": "think", "tool_choice": "tools"}

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """`defaults`: of sampling. Raises InvalidRequestError for an unsupported option."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        constraint = None
        if self.format:
            constraint = StructuredOutputsParams(json_object=True, param="format")
            if isinstance(self.format, dict):
                constraint = StructuredOutputsParams(json=self.format, lenient=True, param="format")
        options = ModelOptions.model_validate(self.options or {})
        return options.to_params(defaults, constraint, logprobs)

    def _template_options(self, *, continued: bool = False) -> dict[str, Any]:
        """Return the chat template's input other than the messages and tools."""
        thinking: dict[str, Any] = {}
        if isinstance(self.think, str):
            thinking = reasoning_options(self.think) | {"enable_thinking": True}
        elif self.think is not None:
            thinking = {"enable_thinking": self.think}
        return thinking | end_options(not continued, continued=continued)


def _pictures(images: Sequence[str] | None, place: str, role: str) -> Iterator[PictureUrl]:
    """Yield pictures in base64. `place`: their parameter. Raises InvalidParamError."""
    for index, data in enumerate(images or ()):
        param = f"{place}[{index}]"
        require_role(role, param)
        yield PictureUrl(f"data:;base64,{data}", param)


def _content(text: str, images: Sequence[str] | None) -> str | list[dict[str, str]]:
    """Return a template's content. The pictures precede the text."""
    return content_of([*[IMAGE] * len(images or ()), text])


class OllamaFunction(Body):
    name: Text
    arguments: Schema = Field(default_factory=dict)
    index: Any = Field(None, description="Not read: calls are in order")


class OllamaCall(Body):
    """Tool call of an earlier answer."""

    id: Text | None = None
    function: OllamaFunction


class OllamaMessage(Body):
    role: Annotated[Text, Field(min_length=1, max_length=64, examples=["user"])]
    content: Text | None = None
    thinking: Text | None = Field(
        None, description="The assistant's reasoning; many templates leave it out"
    )
    images: EncodedPictures | None = Field(None, description="Pictures in base64")
    tool_calls: list[OllamaCall] | None = None
    tool_name: Text | None = Field(None, description="With the role tool: the tool called")
    tool_call_id: Text | None = Field(None, description="Default: the first call without a result")


class OllamaChatRequest(AnswerRequest):
    """POST /api/chat."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is a KV cache?"}],
                "stream": False,
                "options": {"num_predict": 64},
            }
        }
    )

    messages: Annotated[list[OllamaMessage], FAIL_FAST] = Field(
        [], max_length=MAX_MESSAGES, description="Without any, the answer says that it is loaded"
    )
    tools: Annotated[list[ChatTool] | None, only_type("function")] = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call"
    )

    @property
    def param_names(self) -> Mapping[str, str]:
        """The engine's parameters whose names differ here."""
        return {**super().param_names, "prompt": "messages"}

    def to_conversation(self, defaults: Mapping[str, Any]) -> Conversation:
        """`defaults`: of sampling. Raises InvalidRequestError for unsupported options."""
        is_continued = self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls
        if is_continued and self.format:
            raise InvalidRequestError(
                "format applies to complete answers, so the last message must not be the "
                "assistant's.",
                param="format",
            )
        return Conversation(
            messages=list(_template_messages(self.messages)),
            pictures=[
                picture
                for index, one in enumerate(self.messages)
                for picture in _pictures(one.images, f"messages[{index}].images", one.role)
            ],
            options=self._template_options(continued=is_continued),
            tools=ToolUse.choose([tool.plain() for tool in self.tools or ()], None),
            params=self.params(defaults),
        )


def _template_messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Yield messages as chat templates take them.

    Calls without an id get one. Results without an id belong to the first open call of their tool,
    or to the first open call."""
    open_calls: deque[tuple[str, str]] = deque()  # (id, name) of calls without a result
    num_calls = 0
    for one in messages:
        message: dict[str, Any] = {
            "role": one.role,
            "content": _content(one.content or "", one.images),
        }
        if one.thinking:
            message["reasoning_content"] = one.thinking
        if one.tool_calls:
            calls = []
            for call in one.tool_calls:
                num_calls += 1
                id = call.id or f"call{num_calls:05}"  # Mistral's templates want nine characters
                calls.append(template_call(id, call.function.name, call.function.arguments))
                open_calls.append((id, call.function.name))
            message["content"] = message["content"] or None
            message["tool_calls"] = calls
        if one.role == "tool":
            matching = (call for call in open_calls if call[1] == one.tool_name)
            found = next(matching, open_calls[0] if open_calls else None)
            if one.tool_call_id is not None:
                found = next((call for call in open_calls if call[0] == one.tool_call_id), None)
            if found is not None:
                open_calls.remove(found)
            id, name = found or ("", "")
            if id := one.tool_call_id or id:
                message["tool_call_id"] = id
            if name := one.tool_name or name:
                message["name"] = name
        yield message


class OllamaGenerateRequest(AnswerRequest):
    """POST /api/generate."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "prompt": "The sea is",
                "raw": True,
                "stream": False,
                "options": {"num_predict": 16},
            }
        }
    )

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_BY_OLLAMA_GENERATE

    prompt: Text = Field("", description="Without one, the answer says that the model is loaded")
    system: Text | None = Field(None, description="System message before the prompt")
    images: EncodedPictures | None = Field(None, description="Pictures in base64")
    raw: StrictBool = Field(
        False, description="Continue the prompt as it is, without a chat template"
    )

    @property
    def is_empty(self) -> bool:
        """True if no answer is wanted."""
        return not self.prompt and not self.images

    def is_raw(self, *, has_template: bool) -> bool:
        """Return True if the prompt is continued as it is: on request, or without a chat template.

        Raises InvalidRequestError for fields that only a chat template can place."""
        if not self.raw:
            return not has_template and not self.system and not self.images
        for name in ("system", "images"):
            if getattr(self, name):
                raise InvalidRequestError(
                    f"{name} cannot be used with raw: the prompt is continued as it is.",
                    param=name,
                )
        return True

    def to_conversation(self, defaults: Mapping[str, Any]) -> Conversation:
        """`defaults`: of sampling. Raises InvalidRequestError for unsupported options."""
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": _content(self.prompt, self.images)}
        ]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return Conversation(
            messages=messages,
            pictures=list(_pictures(self.images, "images", "user")),
            options=self._template_options(),
            params=self.params(defaults),
        )
