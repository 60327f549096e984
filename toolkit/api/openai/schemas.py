"""Requests for completions and chats, as pydantic models: they validate, and document the API."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

import msgspec
from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    Tag,
    model_validator,
)

from toolkit.api.http.body_fields import (
    BY_KIND,
    FAIL_FAST,
    LIST,
    TEXT,
    Body,
    Prompts,
    RequestBody,
    Text,
    encodable,
)
from toolkit.api.http.client_fields import (
    REFUSED_IN_CHAT_MESSAGES,
    REFUSED_IN_CHATS,
    REFUSED_IN_GENERATION,
)
from toolkit.api.openai.beams import Beams
from toolkit.api.openai.conversation import Conversation, SoundFile
from toolkit.api.openai.response_format import (
    ResponseFormat,
    Schema,
    StructuredOutputs,
    resolve_constraint,
)
from toolkit.api.openai.tools import (
    AllowedToolsChoice,
    ChatTool,
    NamedTool,
    ToolCall,
    ToolChoice,
    ToolUse,
    only_type,
)
from toolkit.config.server import TEMPLATE_NAMES
from toolkit.engine.front.feature_places import IMAGE, SOUND, content_of, require_role
from toolkit.engine.front.pictures import PictureUrl
from toolkit.errors import InvalidParamError, InvalidRequestError
from toolkit.sampling.params import MAX_STOP_STRINGS, BeamSearchParams, SamplingParams
from toolkit.text.tokenizer import Tokenizer

Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]  # range of the engine's arrays and messages
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_MESSAGES = 16_384  # of one conversation; also parts of one message
MAX_TOOLS = 128  # of one request
MAX_BIASES = 65_536  # tokens of one logit_bias
STOPS = Field(max_length=MAX_STOP_STRINGS, fail_fast=True)


def _check_biases(given: Any) -> Any:
    """Stop at the first wrong value: pydantic would report each one."""
    if isinstance(given, dict):
        if len(given) > MAX_BIASES:
            raise ValueError(f"must have at most {MAX_BIASES} tokens, not {len(given)}")
        wrong = next(
            (key for key, value in given.items() if not isinstance(value, int | float)), None
        )
        if wrong is not None:
            raise ValueError(f"must have a number at {wrong[:32]!a}")
    return given


class StreamOptions(Body):
    include_usage: StrictBool = Field(
        False, description="End the stream with an event that reports the usage"
    )
    continuous_usage_stats: StrictBool = Field(
        False, description="Report the usage so far in every event; needs include_usage"
    )


class SamplingFields(RequestBody):
    """Fields of completions and chats. Those that OpenAI lacks have vLLM's names."""

    model: str | None = None
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(
        None, description="0 to 2; 0 always picks the likeliest token"
    )
    top_p: float | None = None
    n: int | None = Field(None, description="Number of answers")
    stop: Annotated[Annotated[Text, TEXT] | Annotated[list[Text], STOPS, LIST], BY_KIND] | None = (
        Field(None, description="Texts that end an answer; the answer does not include them")
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_biases)] | None = None
    seed: int | None = None
    user: str | None = Field(None, description="Accepted for compatibility; not stored")

    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = Field(
        None,
        validation_alias=AliasChoices("repetition_penalty", "repeat_penalty"),
        description="Also called repeat_penalty",
    )
    min_tokens: Int | None = None
    ignore_eos: StrictBool = False
    stop_token_ids: Annotated[list[int], FAIL_FAST] | None = None
    allowed_token_ids: Annotated[list[int], FAIL_FAST] | None = Field(
        None, description="Only these tokens can be generated"
    )
    bad_words: Annotated[list[Text], FAIL_FAST] | None = Field(
        None, description="Texts that the answer must not contain"
    )
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    spaces_between_special_tokens: StrictBool = False
    truncate_prompt_tokens: Int | None = Field(
        None,
        description="Keep this many tokens at the end of the prompt; -1: as many as leave room "
        "for the answer",
    )
    prompt_logprobs: int | None = None
    return_token_ids: StrictBool = Field(
        False, description="Also return the token ids of the prompt and the answer"
    )
    return_tokens_as_token_ids: StrictBool = Field(
        False, description="Name the tokens of log-probabilities by their ids, as token_id:N"
    )
    best_of: int | None = Field(
        None,
        description="Return the n likeliest of so many answers; not for streams. Number of beams "
        "with use_beam_search. Chats need it",
    )
    use_beam_search: StrictBool = Field(
        False, description="Find n answers by beam search with best_of (or n) beams"
    )
    length_penalty: float = Field(
        1.0, description="For beam search: values above 0 prefer long answers"
    )
    early_stopping: Literal[True, False, "never"] = Field(
        False,
        description="For beam search. true: stop once there are as many finished answers as "
        "beams; false: when a better one is unlikely; never: when there cannot be a better one",
    )
    response_format: ResponseFormat | None = Field(None, description="Constraint on the answer")
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Constraint on the answer, of more kinds than response_format"
    )
    grammar: Text = Field("", description="Grammar of the answer, in GBNF or Lark")
    json_schema: Schema | None = Field(None, description="JSON schema that the answer satisfies")
    vllm_xargs: Annotated[dict[str, Any], AfterValidator(encodable)] | None = Field(
        None, description="Arguments of logits processors, by name; they say which ones run"
    )
    num_speculative_tokens: Int | None = Field(
        None, description="Most guesses that a step verifies; 0 turns speculative decoding off"
    )
    priority: Int = Field(
        0, description="With --scheduling-policy priority, the lowest value runs first"
    )

    def _params(
        self, defaults: Mapping[str, Any], max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        for name in ("length_penalty", "early_stopping"):
            if name in self.model_fields_set and not self.use_beam_search:
                raise InvalidRequestError(f"{name} needs use_beam_search to be true.", param=name)
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise InvalidRequestError(
                f"best_of must be at least n ({self.n or 1}), not {self.best_of}.", param="best_of"
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs cannot be streamed.", param="prompt_logprobs"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options needs stream to be true.", param="stream_options"
            )
        return answer_params(
            defaults,
            max_tokens,
            {name: getattr(self, name) for name in _SAMPLING_PARAMS},
            may_be_empty=self.is_prompt_only,
            logprobs=logprobs,
            logit_bias=_parse_biases(self.logit_bias),
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            structured_outputs=resolve_constraint(
                self.response_format, self.structured_outputs, self.grammar, self.json_schema
            ),
            extra_args=self.vllm_xargs or None,
        )

    def token_namer(self, tokenizer: Tokenizer | None) -> Callable[[int], str]:
        """Return a function from a token id to its name in log-probabilities."""
        if self.return_tokens_as_token_ids:
            return "token_id:{}".format
        return (lambda _: "") if tokenizer is None else tokenizer.token_names.__getitem__

    @property
    def is_prompt_only(self) -> bool:
        """True if no answer is wanted, only the prompt and its log-probabilities."""
        return False

    @property
    def needs_selection(self) -> bool:
        """True if more answers are generated than returned."""
        return not self.use_beam_search and (self.best_of or 1) > (self.n or 1)

    def _beams(self, max_tokens: int | None, logprobs: int | None) -> Beams | None:
        if not self.use_beam_search:
            return None
        if self.stream:
            raise InvalidRequestError(
                "Beam search cannot be streamed: the best answers are known only at the end.",
                param="stream",
            )
        refused = _non_default(self, _UNSUPPORTED_WITH_BEAMS)
        if self.temperature:
            refused.append("temperature")
        if refused:
            raise InvalidRequestError(
                f"Beam search does not support {', '.join(refused)}: it ranks answers by "
                "log-probability alone.",
                param=refused[0],
            )
        if max_tokens is None:
            raise InvalidRequestError("Beam search needs max_tokens.", param="max_tokens")
        try:
            params = BeamSearchParams(
                beam_width=self.best_of or self.n or 1,
                max_tokens=max_tokens,
                length_penalty=self.length_penalty,
                early_stopping=self.early_stopping,
                ignore_eos=self.ignore_eos,
                stop_token_ids=self.stop_token_ids or [],
                logprobs=logprobs,
            )
        except InvalidRequestError as error:
            raise error.renamed({"beam_width": "best_of" if self.best_of else "n"}) from None
        return Beams(params, self.n or 1, self.truncate_prompt_tokens)

    @property
    def has_final_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_continuous_usage(self) -> bool:
        """True if each event of a stream has the usage so far."""
        return (
            self.has_final_usage
            and self.stream_options is not None
            and self.stream_options.continuous_usage_stats
        )


_SAMPLING_PARAMS = (
    "temperature", "top_p", "n", "stop", "presence_penalty", "frequency_penalty", "seed", "top_k",
    "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "prompt_logprobs",
    "allowed_token_ids", "bad_words", "truncate_prompt_tokens", "num_speculative_tokens",
)  # fmt: skip


def answer_params(
    defaults: Mapping[str, Any],
    max_tokens: int | None,
    given: Mapping[str, Any],
    *,
    may_be_empty: bool = False,
    **options: Any,
) -> SamplingParams:
    """Return the parameters of an answer. None in `given` means the model's default, or ours.

    Raises InvalidRequestError for values that the API does not allow."""
    temperature = given.get("temperature")
    if temperature is not None and not 0.0 <= temperature <= 2.0:
        raise InvalidRequestError(
            f"temperature must be from 0 to 2, not {temperature!r}.", param="temperature"
        )
    if max_tokens == 0 and not may_be_empty:
        raise InvalidParamError("max_tokens", "must be at least 1; got 0.")
    found = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{**defaults, **found, "max_tokens": max_tokens, **options})


class CompletionRequest(SamplingFields):
    """POST /v1/completions."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"prompt": "The sea is", "max_tokens": 16}}
    )

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_GENERATION

    prompt: Prompts
    max_tokens: int = Field(
        16, description="Maximum tokens to generate; may be 0 with echo or prompt_logprobs"
    )
    logprobs: int | None = Field(
        None, description="Number of likeliest tokens to report at each position"
    )
    echo: StrictBool = Field(False, description="Put the prompt before the answer")
    suffix: str | None = Field(None, description="Not supported")

    @property
    def is_prompt_only(self) -> bool:
        return self.max_tokens == 0 and (self.echo or self.prompt_logprobs is not None)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range and an unsupported option."""
        if self.suffix:
            raise InvalidRequestError(
                "suffix is not supported: the models here do not fill in the middle.",
                param="suffix",
            )
        if self.needs_selection and self.stream:
            raise InvalidRequestError(
                "best_of cannot be streamed: the best answers are known only at the end.",
                param="best_of",
            )
        params = self._params(defaults, self.max_tokens, self.logprobs)
        if self.echo and self.logprobs is not None:
            params.prompt_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        if not self.needs_selection:
            return params
        return msgspec.structs.replace(params, n=self.best_of, logprobs=self.logprobs or 0)

    def beams(self) -> Beams | None:
        """Raises InvalidRequestError for options that beam search does not support."""
        return self._beams(self.max_tokens, self.logprobs)

    @property
    def param_names(self) -> dict[str, str]:
        """The engine's parameters whose names differ here."""
        return {"extra_args": "vllm_xargs"}

    def prompts(self) -> list[str | list[int]]:
        """Raises InvalidRequestError for an empty list and for too many prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("The prompt is empty.", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        if len(self.prompt) > 2048:
            raise InvalidRequestError(
                f"A request takes at most 2048 prompts, not {len(self.prompt)}.", param="prompt"
            )
        return list(self.prompt)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class RefusalPart(Body):
    """Refusal of the assistant, in the history."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def _check_processor_settings(given: dict[str, Any]) -> dict[str, Any]:
    if given:
        raise ValueError(
            "A request cannot set it; it is an option of the server, --mm-processor-kwargs"
        )
    return given


ProcessorSettings = Annotated[dict[str, Any], AfterValidator(_check_processor_settings)]
PROCESSOR_SETTINGS = Field(
    None, description="Refused unless empty: an option of the server, --mm-processor-kwargs"
)
Detail = Literal["auto", "low", "high", "original"]
DETAIL = Field(None, description="Not read: the server's --mm-processor-kwargs sets the size")


class ImageUrl(Body):
    url: Text = Field(description="data: URL with base64, or an http(s) or file URL if allowed")
    detail: Detail | None = DETAIL


class ImagePart(Body):
    """Picture, in messages of the user and of tools."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[Text, TEXT] | Annotated[ImageUrl, Tag("(object)")],
        Discriminator(lambda value: TEXT.tag if isinstance(value, str) else "(object)"),
    ]

    def to_url(self, place: str) -> PictureUrl:
        """`place`: the parameter of this part."""
        if isinstance(self.image_url, str):
            return PictureUrl(self.image_url, f"{place}.image_url")
        return PictureUrl(self.image_url.url, f"{place}.image_url.url")


class InputAudio(Body):
    data: Text = Field(description="A sound file in base64")
    format: Text | None = Field(None, description="Not read: the file shows what it is")


class AudioPart(Body):
    """Sound, in messages of the user and of tools."""

    type: Literal["input_audio"]
    input_audio: InputAudio


PART_TYPES = ("text", "image_url", "input_audio", "refusal")


def _kind_of_part(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return f"({kind if kind in PART_TYPES else 'text'})"


Part = Annotated[
    Annotated[TextPart, Tag("(text)")]
    | Annotated[ImagePart, Tag("(image_url)")]
    | Annotated[AudioPart, Tag("(input_audio)")]
    | Annotated[RefusalPart, Tag("(refusal)")],
    Discriminator(_kind_of_part),
]


def _check_part_types(content: Any) -> Any:
    """Name an unsupported type here: pydantic's error would list what each variant lacks."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in PART_TYPES:
            raise ValueError(
                "Only content parts of the types 'text', 'image_url' and 'input_audio' are "
                f"supported, not {kind[:32]!a}"
            )
    return content


Content = Annotated[
    Annotated[Text, TEXT] | Annotated[list[Part], FAIL_FAST, Field(max_length=MAX_MESSAGES), LIST],
    BY_KIND,
    BeforeValidator(_check_part_types),
]
TextContent = Annotated[
    Annotated[Text, TEXT]
    | Annotated[list[TextPart], FAIL_FAST, Field(max_length=MAX_MESSAGES), LIST],
    BY_KIND,
]


class ChatMessage(Body):
    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_CHAT_MESSAGES

    role: Annotated[Text, Field(min_length=1, max_length=64, examples=["user"])]
    content: Content | None = None
    refusal: Text | None = Field(None, description="The assistant's, read if there is no content")
    name: Text | None = None
    tool_calls: list[ToolCall] | None = Field(None, description="Calls that the assistant made")
    tool_call_id: Text | None = Field(
        None, description="With the role tool: id of the call that this is the result of"
    )
    reasoning_content: Text | None = Field(
        None, description="The assistant's reasoning; many templates leave it out"
    )
    reasoning: Text | None = Field(None, description="Another name of reasoning_content")

    def to_template(self) -> dict[str, Any]:
        """Leave empty fields out. The content is text, or parts if it has pictures or sound.

        The content of calls without any is none."""
        parts = self.content if isinstance(self.content, list) else [self.content]
        texts = (
            IMAGE
            if isinstance(part, ImagePart)
            else SOUND
            if isinstance(part, AudioPart)
            else _text(part)
            for part in parts
        )
        content = content_of(texts) or self.refusal or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if self.tool_calls:
            if self.content is None and not content:
                message["content"] = None
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        for name in ("name", "tool_call_id"):
            if getattr(self, name):
                message[name] = getattr(self, name)
        if reasoning := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = reasoning
        return message

    def pictures(self, place: str) -> Iterator[PictureUrl]:
        """Yield the pictures. `place`: the parameter of this message. Raises InvalidParamError."""
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, ImagePart):
                picture = part.to_url(f"{place}.content[{index}]")
                require_role(self.role, picture.param)
                yield picture

    def sounds(self, place: str) -> Iterator[SoundFile]:
        """Yield the sound. `place`: the parameter of this message. Raises InvalidParamError."""
        for index, part in enumerate(self.content if isinstance(self.content, list) else ()):
            if isinstance(part, AudioPart):
                param = f"{place}.content[{index}].input_audio.data"
                require_role(self.role, param, "clip")
                yield SoundFile(part.input_audio.data, param)


class Prediction(Body):
    """Text that much of the answer repeats, such as the file that it changes."""

    type: Literal["content"]
    content: TextContent


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

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_CHATS

    messages: Annotated[list[ChatMessage], FAIL_FAST] = Field(max_length=MAX_MESSAGES)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: StrictBool = False
    top_logprobs: int | None = None
    n_probs: int = Field(
        0, ge=0, description="Sets logprobs, and top_logprobs to this number, unless it is 0"
    )
    timings_per_token: StrictBool = Field(
        False, description="Report the times of the answer so far, as llama.cpp does"
    )
    tools: Annotated[list[ChatTool] | None, only_type("function")] = Field(
        None, max_length=MAX_TOOLS, description="Functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Default: auto. With required (also in allowed_tools) or a named tool, the "
        "answer is calls with valid arguments, which stop and stop_token_ids do not cut",
    )
    parallel_tool_calls: StrictBool = Field(True, description="Allow several calls in one answer")
    add_generation_prompt: StrictBool = Field(
        True, description="Begin a new answer, also after a message of the assistant"
    )
    continue_final_message: StrictBool = Field(
        False,
        description="Continue the last message. Default: true if it is the assistant's, has no "
        "calls, and add_generation_prompt is left out",
    )
    chat_template: Text | None = Field(
        None,
        max_length=65536,
        description="Jinja template of the prompt; needs --trust-request-chat-template",
    )
    prediction: Prediction | None = Field(
        None, description="Text that the answer may repeat: makes the drafter ngram guess from it"
    )
    echo: StrictBool = Field(
        False,
        description="Put the text of the last message before the answer, if it is the assistant's",
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="For chat templates that read it; none also sets enable_thinking to false"
    )
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(encodable)] | None = None
    mm_processor_kwargs: ProcessorSettings | None = PROCESSOR_SETTINGS

    @model_validator(mode="after")
    def _read_n_probs(self) -> Self:
        if self.n_probs and not self.logprobs:
            self.logprobs, self.top_logprobs = True, self.n_probs
        return self

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        """Raises InvalidRequestError for a value out of range."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs needs logprobs to be true.", param="top_logprobs"
            )
        if self.needs_selection:
            raise InvalidRequestError(
                "In a chat, best_of above n needs use_beam_search to be true.", param="best_of"
            )
        params = self._params(defaults, self._limit, self._num_logprobs)
        if self.prediction is not None:
            params.prediction = _text(self.prediction.content)
        return params

    @property
    def _limit(self) -> int | None:
        """Maximum tokens to generate."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def _num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def to_conversation(self, defaults: Mapping[str, Any] | None) -> Conversation:
        """Return the conversation; without `defaults` of sampling, for its prompt alone.

        Raises InvalidRequestError for a value out of range, and options that exclude each other."""
        params = None if defaults is None else self.params(defaults)
        options = self._template_options()
        use = self.tool_use()
        if not self.messages:
            raise InvalidRequestError("The conversation has no messages.", param="messages")
        return Conversation(
            messages=[message.to_template() for message in self.messages],
            pictures=[
                picture
                for index, message in enumerate(self.messages)
                for picture in message.pictures(f"messages[{index}]")
            ],
            sounds=[
                sound
                for index, message in enumerate(self.messages)
                for sound in message.sounds(f"messages[{index}]")
            ],
            options=options,
            tools=use,
            template=self.chat_template,
            params=params,
            beams=None if params is None else self._beams(self._limit, self._num_logprobs),
            priority=self.priority,
        )

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequestError for a tool_choice that does not match the tools."""
        if self.tools == []:
            raise InvalidRequestError(
                "tools is an empty array. Name at least one tool, or leave it out.",
                param="tools",
                code="empty_array",
            )
        choice, names, is_named = self.tool_choice, None, False
        mode = choice if isinstance(choice, str) else None
        if isinstance(choice, NamedTool):
            mode, names, is_named = "required", [choice.function.name], True
        elif isinstance(choice, AllowedToolsChoice):
            allowed = choice.allowed_tools
            mode, names = allowed.mode, [tool.function.name for tool in allowed.tools]
        return ToolUse.choose(
            [tool.plain() for tool in self.tools or ()],
            mode,
            names,
            is_named=is_named,
            parallel=self.parallel_tool_calls,
        )

    @property
    def param_names(self) -> dict[str, str]:
        """The engine's parameters whose names differ here."""
        names = {
            "prompt": "messages",
            "logprobs": "top_logprobs",
            "extra_args": "vllm_xargs",
        }
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return names

    @property
    def echo_text(self) -> str:
        """Text to put before the answer."""
        last = self.messages[-1] if self.echo and self.messages else None
        return _text(last.content) if last is not None and last.role == "assistant" else ""

    def _template_options(self) -> dict[str, Any]:
        """Return the chat template's input other than the messages and tools."""
        given = self.chat_template_kwargs or {}
        if reserved := sorted(TEMPLATE_NAMES & set(given)):
            raise InvalidRequestError(
                f"chat_template_kwargs cannot set {', '.join(reserved)}.",
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
        return (
            reasoning_options(self.reasoning_effort)
            | given
            | end_options(
                self.add_generation_prompt and not self._is_continued, continued=self._is_continued
            )
        )

    @property
    def _is_continued(self) -> bool:
        """True if the answer continues the last message."""
        if {"add_generation_prompt", "continue_final_message"} & self.model_fields_set:
            return self.continue_final_message
        last = self.messages[-1] if self.messages else None
        return last is not None and last.role == "assistant" and not last.tool_calls


def reasoning_options(effort: str | None) -> dict[str, Any]:
    """Return a chat template's options for an effort."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def end_options(adds_prompt: bool = True, *, continued: bool = False) -> dict[str, Any]:
    """Return a chat template's options for the end: a new answer, or the last message goes on."""
    return {"add_generation_prompt": adds_prompt, "continue_final_message": continued}


_UNSUPPORTED_WITH_BEAMS = (
    "tools", "prompt_logprobs", "echo", "stop", "top_p", "top_k", "min_p",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "min_tokens", "include_stop_str_in_output",
    "response_format", "structured_outputs", "grammar", "json_schema", "skip_special_tokens",
    "spaces_between_special_tokens", "vllm_xargs", "timings_per_token",
)  # fmt: skip


def _non_default(body: Body, names: Sequence[str]) -> list[str]:
    """Return the names of fields whose value is not the default."""
    defaults = type(body).model_fields
    return [
        name
        for name in names
        if name in defaults and getattr(body, name) not in (defaults[name].default, [])
    ]


def _parse_biases(given: dict[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise InvalidRequestError(
            "logit_bias maps token ids to numbers from -100 to 100.", param="logit_bias"
        ) from None


def _text(content: str | Part | Sequence[Part] | None) -> str:
    """Return the text of a message or of a part. Pictures and sound have none."""
    if content is None or isinstance(content, ImagePart | AudioPart):
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, TextPart | RefusalPart):
        return content.text
    return "".join(map(_text, content))
