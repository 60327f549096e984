"""Requests, as pydantic models (they validate and document), and responses, as msgspec structs (they are
fast).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams

T = TypeVar("T")

# ---- requests


def _encodable(value: T) -> T:
    """JSON's escapes can spell half a surrogate pair, which is no character and cannot be sent on."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError:
        raise ValueError("Input should be valid Unicode, without lone surrogates") from None
    return value


Text = Annotated[str, AfterValidator(_encodable)]
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""What the engine's arrays and messages hold."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False


class SamplingFields(BaseModel):
    """What both kinds of completion take. Fields that are not OpenAI's have vLLM's names."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, description="0 to 2; 0 always takes the likeliest token")
    top_p: float | None = None
    n: int | None = None
    stop: Text | list[Text] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = Field(None, description="Taken for compatibility; kept nowhere")

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: Int = 0

    def _params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        if self.temperature is not None and not 0.0 <= self.temperature <= 2.0:
            raise InvalidRequestError(
                f"temperature is from 0 to 2; it got {self.temperature!r}.", param="temperature"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed.", param="prompt_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream to be true.", param="stream_options")
        given = {
            name: getattr(self, name)
            for name in (
                "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
                "repetition_penalty", "min_tokens", "stop_token_ids", "prompt_logprobs",
            )
            if getattr(self, name) is not None
        }  # fmt: skip
        return SamplingParams(
            **{**defaults, **given},
            max_tokens=max_tokens,
            logprobs=logprobs,
            logit_bias=_bias(self.logit_bias),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    prompt: Text | list[Text] | list[StrictInt] | list[list[StrictInt]]
    max_tokens: int | None = Field(16, description="Most tokens to generate")
    logprobs: int | None = Field(
        None, description="How many of the likeliest tokens to report at each position"
    )
    best_of: int | None = None
    echo: bool = False
    suffix: str | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range or an option that is not supported."""
        if self.echo:
            raise InvalidRequestError("echo is not supported.", param="echo")
        if self.suffix:
            raise InvalidRequestError(
                "suffix is not supported: the models here do not fill in the middle.", param="suffix"
            )
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                "best_of is not supported; n gives several completions.", param="best_of"
            )
        return self._params(defaults, self.max_tokens, self.logprobs)

    def prompts(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for an empty list or one prompt too many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > 2048:
            raise InvalidRequestError(
                f"A request takes at most 2048 prompts; it got {len(self.prompt)}.", param="prompt"
            )
        return list(self.prompt)


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: Text


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Annotated[Text, Field(min_length=1, max_length=64)]
    content: Text | list[TextPart] | None = None
    name: Text | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: Literal["text"] = "text"


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_encodable)] | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._params(defaults, limit, (self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them: content parts joined to one text."""
        if not self.messages:
            raise InvalidRequestError("There are no messages.", param="messages")
        return [
            {"role": m.role, "content": _text(m.content)} | ({"name": m.name} if m.name else {})
            for m in self.messages
        ]

    def template_options(self) -> dict[str, Any]:
        reserved = {
            "tokenize",
            "return_tensors",
            "return_dict",
            "chat_template",
            "conversation",
            "messages",
            "self",
        }
        extra = self.chat_template_kwargs or {}
        if reserved & set(extra):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(sorted(reserved & set(extra)))}.",
                param="chat_template_kwargs",
            )
        if (
            self.continue_final_message
            and self.add_generation_prompt
            and "add_generation_prompt" in self.model_fields_set
        ):
            raise InvalidRequestError("continue_final_message and add_generation_prompt exclude each other.")
        return extra | {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidRequestError(
            "logit_bias maps token ids to numbers from -100 to 100.", param="logit_bias"
        ) from None


def _text(content: str | list[TextPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)


# ---- responses


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one entry for each token."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    role: str
    content: str
    refusal: None = None


class ChatChoice(msgspec.Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class ChatCompletion(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, Any] | None] | msgspec.UnsetType | None = msgspec.UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class ModelCard(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "tk"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"
