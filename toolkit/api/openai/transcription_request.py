"""Requests for transcriptions: the fields of a form."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, get_origin

from pydantic import BeforeValidator, Field, StrictBool

from toolkit.api.http.body_fields import RequestBody, Text, parse_body
from toolkit.api.http.client_fields import REFUSED_IN_TRANSCRIPTIONS
from toolkit.api.http.forms import FILE, Form
from toolkit.errors import InvalidParamError
from toolkit.speech.formats import TIMED_FORMATS, Format
from toolkit.speech.languages import find_language
from toolkit.speech.tokens import Task
from toolkit.speech.transcriber import TranscriptionOptions

Granularity = Literal["word", "segment"]
STREAMED_FORMATS = ("json", "text", "verbose_json")
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_KEY = re.compile(r"(\w+)\[\w*\]", re.ASCII)  # such as timestamp_granularities[]

Flag = Annotated[
    StrictBool,
    BeforeValidator(lambda text: _FLAGS.get(text.lower(), text) if isinstance(text, str) else text),
]
"""True or false, as forms write them."""


class TranscriptionRequest(RequestBody):
    """POST /v1/audio/transcriptions and /v1/audio/translations, without the file."""

    refused_fields: ClassVar[Mapping[str, str]] = REFUSED_IN_TRANSCRIPTIONS

    model: str | None = None
    language: str | None = Field(
        None, description="Language of the sound, such as en; without it, it is detected"
    )
    prompt: Text = Field("", description="Text before the sound: style and spelling to follow")
    response_format: Format = "json"
    temperature: float = Field(0.0, ge=0.0, le=1.0, description="0 picks the likeliest token")
    seed: int | None = None
    timestamp_granularities: list[Granularity] = Field(
        [], max_length=2, description="Times that verbose_json has; default: segment"
    )
    include: list[Literal["logprobs"]] = Field(
        [], max_length=1, description="logprobs: log-probability of each token, with json"
    )
    stream: Flag = Field(False, description="Send text as events while it is transcribed")
    stream_continuous_usage_stats: Flag = Field(
        False,
        description="Events of a stream have the seconds transcribed so far, all seconds, and "
        "tokens",
    )
    chunking_strategy: str | None = Field(
        None, description="auto: long sound is cut where it is quiet, as it is without this field"
    )
    condition_on_previous_text: Flag = Field(
        False,
        description="Transcribe 30 seconds at a time, each after the text before it; slower",
    )
    temperature_fallback: Flag | None = Field(
        None,
        description="Repeat bad answers at higher temperatures, and leave out silence. Default: "
        "--transcription-fallback",
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, description="Most tokens of the answer to 30 seconds"
    )

    ignore_eos: Flag = Field(
        False, description="Generate max_completion_tokens tokens, for benchmarks"
    )

    @property
    def has_words(self) -> bool:
        return "word" in self.timestamp_granularities

    @property
    def has_segments(self) -> bool:
        return "segment" in self.timestamp_granularities or not self.has_words

    def check(self) -> None:
        """Raises InvalidRequestError for fields that exclude each other, or are not supported."""
        is_verbose = self.response_format == "verbose_json"
        if self.timestamp_granularities and not is_verbose:
            raise InvalidParamError(
                "timestamp_granularities",
                f"needs response_format verbose_json, not {self.response_format}.",
            )
        if self.include and self.response_format != "json":
            raise InvalidParamError(
                "include", f"needs response_format json, not {self.response_format}."
            )
        if self.stream and self.response_format not in STREAMED_FORMATS:
            raise InvalidParamError(
                "response_format",
                f"must be one of {', '.join(STREAMED_FORMATS)} in a stream, which has text as it "
                f"comes; got {self.response_format}.",
            )
        if self.stream_continuous_usage_stats and not self.stream:
            raise InvalidParamError("stream_continuous_usage_stats", "needs stream to be true.")
        if self.chunking_strategy not in (None, "auto"):
            raise InvalidParamError(
                "chunking_strategy",
                "must be auto: sound is cut where it is quiet, without voice detection.",
            )

    def options(
        self, known: Collection[str], before: Sequence[int], task: Task, *, falls_back: bool
    ) -> TranscriptionOptions:
        """Return what a transcriber does.

        known: codes of the model's languages. before: tokens of `prompt`, if they stand before
        each window. `falls_back`: the server's default. Raises InvalidRequestError for an unknown
        language."""
        language = self.language or "auto"  # as whisper.cpp names its detection
        return TranscriptionOptions(
            language=None if language == "auto" else find_language(language, known),
            task=task,
            prompt=before,
            temperature=self.temperature,
            seed=self.seed,
            max_tokens=self.max_completion_tokens,
            ignores_end=self.ignore_eos,
            has_timestamps=self.response_format in TIMED_FORMATS,
            has_logprobs=bool(self.include),
            has_scores=self.response_format == "verbose_json",
            follows_previous=self.condition_on_previous_text,
            falls_back=falls_back
            if self.temperature_fallback is None
            else self.temperature_fallback,
        )

    def require_text_alone(self) -> None:
        """Raise InvalidParamError for times and checks of answers, which only Whisper has."""
        if self.response_format not in ("json", "text"):
            raise InvalidParamError(
                "response_format", "must be json or text: this model writes no times."
            )
        if self.temperature_fallback:
            raise InvalidParamError(
                "temperature_fallback", "needs a model such as Whisper. Leave it out."
            )
        if self.condition_on_previous_text:
            raise InvalidParamError(
                "condition_on_previous_text",
                "needs a model such as Whisper. Leave it out, and describe the sound in prompt.",
            )


def parse_form(form: Form) -> TranscriptionRequest:
    """Return the fields of a form. Those without text are left out, as many forms send them.

    Raises InvalidRequestError."""
    given: dict[str, Any] = {}
    for key, values in form.fields.items():
        found = _KEY.fullmatch(key)
        name, texts = found[1] if found else key, [one for one in values if one]
        if key.endswith("[]") or name in _LISTS:
            given[name] = [*given.get(name, []), *texts]
        elif found:  # a member of an object, such as server_vad's type
            given[name] = key
        elif len(texts) > 1:
            raise InvalidParamError(name[:100], "is in the form twice.")
        elif texts:
            given[name] = texts[0]
    body = parse_body(TranscriptionRequest, given)
    body.check()
    return body


_LISTS = frozenset(
    name
    for name, field in TranscriptionRequest.model_fields.items()
    if get_origin(field.annotation) is list
)


def form_document() -> dict[str, Any]:
    """Return the description of the form for the OpenAPI document."""
    schema = TranscriptionRequest.model_json_schema()
    fields = {
        f"{name}[]" if name in _LISTS else name: field
        for name, field in schema["properties"].items()
    }
    file = {"type": "string", "format": "binary", "title": "File", "description": "Sound"}
    form = {"type": "object", "properties": {FILE: file, **fields}, "required": [FILE]}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}}
