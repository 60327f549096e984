"""Requests for completions and chats, as pydantic models: they validate and document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from toolkit.api.http.body_fields import (
    BY_KIND,
    LIST,
    TEXT,
    TO_FIRST_MISTAKE,
    Body,
    Prompts,
    WholeBody,
    encodable,
)
from toolkit.api.http.body_fields import Text as Text  # for those who take it from here
from toolkit.api.openai.response_format import ResponseFormat, StructuredOutputs, asked_form
from toolkit.api.openai.tools import Tool, ToolCall, ToolChoice, chosen_tools
from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import MAX_STOP_STRINGS, BeamSearchParams, SamplingParams

# ---- requests


Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""What the engine's arrays and messages hold."""
MAX_MESSAGES = 16_384
"""Of one conversation, and parts of one message."""
MAX_TOOLS = 128
"""That one request tells of."""
MAX_BIASES = 65_536
"""Tokens of one `logit_bias`."""


STOPS = Field(max_length=MAX_STOP_STRINGS, fail_fast=True)


def _only_numbers(given: Any) -> Any:
    """Ends the reading at the first mistake, where each would be told of by itself."""
    if isinstance(given, dict):
        if len(given) > MAX_BIASES:
            raise ValueError(f"Input should have at most {MAX_BIASES} tokens, not {len(given)}")
        wrong = next(
            (key for key, value in given.items() if not isinstance(value, int | float)), None
        )
        if wrong is not None:
            raise ValueError(f"Input should be a valid number at {wrong[:32]!a}")
    return given


class StreamOptions(Body):
    include_usage: bool = Field(
        False, description="Ends the stream with an event that has the usage"
    )
    continuous_usage_stats: bool = Field(False, description="Tells the usage so far in every event")


class SamplingFields(WholeBody):
    """What both kinds of completion take. Fields that are not OpenAI's have vLLM's names."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(
        None, description="0 to 2; 0 always takes the likeliest token"
    )
    top_p: float | None = None
    n: int | None = Field(None, description="How many answers")
    stop: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], STOPS, LIST], BY_KIND] | None = (
        Field(None, description="Texts that end an answer, and are not part of it")
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_only_numbers)] | None = None
    seed: int | None = None
    user: str | None = Field(None, description="Taken for compatibility; kept nowhere")

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Int | None = None
    ignore_eos: bool = False
    stop_token_ids: Annotated[list[int], TO_FIRST_MISTAKE] | None = None
    allowed_token_ids: Annotated[list[int], TO_FIRST_MISTAKE] | None = Field(
        None, description="The only tokens that can be chosen"
    )
    bad_words: Annotated[list[Text], TO_FIRST_MISTAKE] | None = Field(
        None, description="Texts that the answer does not have"
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    truncate_prompt_tokens: Int | None = Field(
        None,
        description="Keeps that many of the prompt's last tokens; -1: what leaves room for the answer",
    )
    prompt_logprobs: int | None = None
    return_token_ids: bool = Field(
        False, description="Tells the tokens of prompt and answer beside the text"
    )
    response_format: ResponseFormat | None = Field(None, description="What the answer is held to")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The same, in more forms"
    )
    priority: Int = Field(
        0, description="With --scheduling-policy priority: the smaller runs first"
    )

    def _params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        if self.temperature is not None and not 0.0 <= self.temperature <= 2.0:
            raise InvalidRequestError(
                f"temperature is from 0 to 2; it got {self.temperature!r}.", param="temperature"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed.", param="prompt_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options needs stream to be true.", param="stream_options"
            )
        given = {
            name: getattr(self, name)
            for name in (
                "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "seed", "top_k", "min_p",
                "repetition_penalty", "min_tokens", "stop_token_ids", "prompt_logprobs", "allowed_token_ids", "bad_words",
                "truncate_prompt_tokens",
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
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            structured_outputs=asked_form(self.response_format, self.structured_outputs),
        )

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def keeps_telling_usage(self) -> bool:
        """Whether each event of a stream has the usage so far."""
        return (
            self.tells_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The sea is", "max_tokens": 16}}
    )

    prompt: Prompts
    max_tokens: int | None = Field(
        16, description="Most tokens to generate; 0 with echo or prompt_logprobs"
    )
    logprobs: int | None = Field(
        None, description="How many of the likeliest tokens to report at each position"
    )
    best_of: int | None = Field(
        None, description="Generates so many answers, and returns the n likeliest; not for streams"
    )
    echo: bool = Field(False, description="Puts the prompt before the answer")
    suffix: str | None = Field(None, description="Not supported")
    use_beam_search: bool = Field(
        False, description="Finds n answers by beam search over best_of (or n) beams"
    )
    length_penalty: float = Field(1.0, description="Of beam search: above 0 prefers long answers")
    early_stopping: Literal[True, False, "never"] = Field(
        False, description="Of beam search: when it is content"
    )

    @property
    def prompt_only(self) -> bool:
        """Whether nothing is generated."""
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    @property
    def chooses(self) -> bool:
        """Whether more answers are generated than returned."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """What the engine is asked for. Raises InvalidRequestError for a value out of range or an option that is not
        supported.
        """
        if self.suffix:
            raise InvalidRequestError(
                "suffix is not supported: the models here do not fill in the middle.",
                param="suffix",
            )
        for name in ("length_penalty", "early_stopping"):
            if name in self.model_fields_set and not self.use_beam_search:
                raise InvalidRequestError(f"{name} needs use_beam_search to be true.", param=name)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError(
                f"best_of is at least n, which is {self.n or 1}; it got {self.best_of}.",
                param="best_of",
            )
        if self.chooses and self.stream:
            raise InvalidRequestError(
                "best_of cannot be streamed: the best are known in the end.", param="best_of"
            )
        # One token is generated where none is wanted, and not shown.
        params = self._params(defaults, 1 if self.prompt_only else self.max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None:
            params.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        if not self.chooses:
            return params
        return msgspec.structs.replace(params, n=self.best_of, logprobs=self.logprobs or 0)

    def beam_params(self) -> BeamSearchParams:
        """Raises InvalidRequestError for what does not go together with beam search."""
        refused = _given(self, _NOT_OF_BEAMS)
        if self.temperature:
            refused.append("temperature")
        if refused:
            raise InvalidRequestError(
                f"Beam search looks at log-probabilities alone: {', '.join(refused)} cannot be combined with it.",
                param=refused[0],
            )
        if self.max_tokens is None:
            raise InvalidRequestError("Beam search needs max_tokens.", param="max_tokens")
        return BeamSearchParams(
            beam_width=self.best_of or self.n or 1,
            max_tokens=self.max_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            ignore_eos=self.ignore_eos,
            stop_token_ids=self.stop_token_ids or [],
        )

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


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """What an assistant said instead of an answer, in the history."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def _only_text(content: Any) -> Any:
    """Says which kind of part is not taken, before the kinds that are complain one by one."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "refusal"):
            raise ValueError(
                f"Content parts are text here (type 'text'); got one of type {kind[:32]!a}"
            )
    return content


Content = Annotated[
    Annotated[Text, TEXT]
    | Annotated[
        list[TextPart | RefusalPart], TO_FIRST_MISTAKE, Field(max_length=MAX_MESSAGES), LIST
    ],
    BY_KIND,
    BeforeValidator(_only_text),
]


class ChatMessage(Body):
    role: Annotated[Text, Field(min_length=1, max_length=64, examples=["user"])]
    content: Content | None = None
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Of the assistant")
    tool_call_id: Text | None = Field(
        None, description="Of the role tool: the call that this answers"
    )
    reasoning_content: Text | None = Field(
        None, description="Of the assistant; many templates leave it out"
    )

    def for_template(self) -> dict[str, Any]:
        """Content parts joined to one text; what is not given is not there."""
        message: dict[str, Any] = {"role": self.role, "content": _text(self.content)}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        return message


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "messages": [{"role": "user", "content": "What is a KV cache?"}],
                "max_tokens": 64,
            }
        }
    )

    messages: Annotated[list[ChatMessage], TO_FIRST_MISTAKE] = Field(max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] | None = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Default: auto. required, also of allowed_tools, and a named tool hold the answer to calls with valid "
        "arguments, which stop and stop_token_ids do not cut",
    )
    parallel_tool_calls: bool = Field(True, description="Whether one answer may have several calls")
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = Field(
        None, max_length=65536, description="A Jinja template; with --trust-request-chat-template"
    )
    echo: bool = Field(
        False,
        description="Puts the text of the last message before the answer when it is the assistant's",
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(encodable)] | None = None

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        limit = (
            self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        )
        return self._params(defaults, limit, (self.top_logprobs or 0) if self.logprobs else None)

    def conversation(self) -> list[dict[str, Any]]:
        """The messages as chat templates expect them: content parts joined to one text."""
        if not self.messages:
            raise InvalidRequestError("There are no messages.", param="messages")
        return [message.for_template() for message in self.messages]

    @property
    def callable_tools(self) -> list[Tool]:
        """Raises InvalidRequestError for a choice that there is not."""
        return chosen_tools(self.tools, self.tool_choice)

    @property
    def echoed(self) -> str:
        """What comes before the answer."""
        last = self.messages[-1] if self.messages else None
        return (
            _text(last.content)
            if self.echo and last is not None and last.role == "assistant"
            else ""
        )

    def template_options(self, *, trusted: bool) -> dict[str, Any]:
        """What the chat template is given beside the messages. `trusted`: the request may bring one of its own.

        Raises InvalidRequestError for options that do not go together, or that the server does not allow.
        """
        if self.chat_template is not None and not trusted:
            raise InvalidRequestError(
                "This server takes no chat templates from requests; --trust-request-chat-template allows them.",
                param="chat_template",
            )
        reserved = {
            "tokenize",
            "return_tensors",
            "return_dict",
            "chat_template",
            "conversation",
            "messages",
            "allow_special_tokens",
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
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt exclude each other."
            )
        if self.chat_template is not None:
            extra = extra | {"chat_template": self.chat_template}
        return extra | {
            "add_generation_prompt": self.add_generation_prompt and not self.continue_final_message,
            "continue_final_message": self.continue_final_message,
        }


_NOT_OF_BEAMS = (
    "stream", "logprobs", "prompt_logprobs", "echo", "stop", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens",
    "include_stop_str_in_output", "return_token_ids", "response_format", "structured_outputs",
    "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip


def _given(body: Body, names: Sequence[str]) -> list[str]:
    """Those that a request has, with another value than the default."""
    defaults = type(body).model_fields
    return [name for name in names if getattr(body, name) != defaults[name].default]


def _bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidRequestError(
            "logit_bias maps token ids to numbers from -100 to 100.", param="logit_bias"
        ) from None


def _text(content: str | Sequence[TextPart | RefusalPart] | None) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else "".join(part.text for part in content)
