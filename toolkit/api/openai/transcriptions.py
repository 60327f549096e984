"""POST /v1/audio/transcriptions and /v1/audio/translations."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from toolkit.api.http.body_fields import Route
from toolkit.api.http.forms import FILE, FormLimits, UploadedFile, read_form
from toolkit.api.http.layers.limits import room_for_answers
from toolkit.api.http.openapi import answers
from toolkit.api.http.routes import Access, access, takes_form
from toolkit.api.http.server import Target, server_of, target_of
from toolkit.api.http.streaming import DONE, EventStream, event, while_connected
from toolkit.api.openai.transcription_request import (
    TranscriptionRequest,
    form_document,
    parse_form,
)
from toolkit.engine.front.alignment import ClipAligner
from toolkit.engine.front.clips import window_seconds
from toolkit.engine.front.input_processor import TokensPrompt
from toolkit.engine.outputs import Delta
from toolkit.errors import EngineError, InvalidRequestError, RequestTimeoutError
from toolkit.metrics import Metrics
from toolkit.sampling.params import SamplingParams
from toolkit.speech.asr_chat import LANGUAGES, ASRChat, conversation, language_header
from toolkit.speech.clip import Clip
from toolkit.speech.formats import (
    TokenLogprob,
    Transcription,
    VerboseTranscription,
    to_srt,
    to_text,
    to_verbose,
    to_vtt,
    usage_of,
)
from toolkit.speech.tokens import HearingInfo, Task
from toolkit.speech.transcriber import (
    MAX_RUNNING,
    MAX_RUNNING_ON_CPU,
    Answer,
    Listener,
    Part,
    Transcriber,
    TranscriptionOptions,
)
from toolkit.speech.transcript import Transcript, WindowText
from toolkit.speech.whisper import Whisper
from toolkit.speech.windows import Windows, split_windows
from toolkit.text.tokenizer import Tokenizer

router = APIRouter(tags=["OpenAI"], route_class=Route)

_TYPES = {"text": "text/plain", "srt": "application/x-subrip", "vtt": "text/vtt"}
"""Media types of the formats that are not JSON."""


class StreamUsage(msgspec.Struct):
    """Sound of a request whose transcript is streamed."""

    seconds: float  # transcribed so far, about: windows run together
    total_seconds: float
    completion_tokens: int  # of the answers so far
    type: str = "duration"


class DeltaEvent(msgspec.Struct):
    """Text that a transcript has grown by.

    The last event of a window has its log-probabilities, if they are asked for."""

    delta: str
    logprobs: list[TokenLogprob] | msgspec.UnsetType = msgspec.UNSET
    usage: StreamUsage | msgspec.UnsetType = msgspec.UNSET
    type: str = "transcript.text.delta"


@router.post(
    "/v1/audio/transcriptions",
    response_model=None,
    responses=answers("OpenAI's Transcription or TranscriptionVerbose", stream=True),
    openapi_extra=form_document(),
)
@access(Access.MODEL_WORK)
@takes_form
async def transcriptions(request: Request) -> Response:
    """Transcribe a sound file, of any length."""
    return await _answer(request, "transcribe")


@router.post(
    "/v1/audio/translations",
    response_model=None,
    responses=answers("OpenAI's Transcription or TranscriptionVerbose", stream=True),
    openapi_extra=form_document(),
)
@access(Access.MODEL_WORK)
@takes_form
async def translations(request: Request) -> Response:
    """Translate a sound file into English text."""
    return await _answer(request, "translate")


async def _answer(request: Request, task: Task) -> Response:
    config = server_of(request).config
    form = await read_form(request, FormLimits(config.max_audio_mb * 2**20))
    body = parse_form(form)
    target = target_of(request, body)
    name = f"transcr-{request.state.request_id}"
    listener, options, seconds = _listener(target, name, body, task)
    tokenizer = target.engine.inputs.require_tokenizer()
    transcriber = Transcriber(listener, options)
    windows = await while_connected(request, _windows(target, form.file, seconds))
    most = MAX_RUNNING_ON_CPU if target.engine.info.device == "cpu" else MAX_RUNNING
    most_running = room_for_answers(target, min(len(windows), most))
    transcript = Transcript(windows.seconds, task)
    timeout, metrics = config.request_timeout, target.engine.metrics
    work = _Work(body, tokenizer, transcriber, windows, most_running, transcript, timeout, metrics)
    if body.stream:
        return EventStream(work.events(), lambda: None, config.sse_keep_alive)
    return await while_connected(request, work.response())


def _listener(
    target: Target, name: str, body: TranscriptionRequest, task: Task
) -> tuple[Listener, TranscriptionOptions, float]:
    """Return what listens to windows, its options, and the longest window in seconds.

    name: beginning of the engine's request ids. Raises InvalidRequestError for a model that does
    not transcribe, and for fields that it does not support."""
    answer, inputs = _EngineAnswer(target, name), target.engine.inputs
    if (hearing := target.engine.info.hearing) is not None:
        aligner = ClipAligner(target.engine, name) if body.has_words else None
        return _whisper(target, answer, body, task, hearing, aligner)
    if (marker := inputs.transcript_marker) is None:
        raise _not_transcribing_error(target)
    if task == "translate":
        raise InvalidRequestError(
            f"{target.name} transcribes, and does not translate. Models such as Whisper do.",
            param="model",
            code="model_not_supported",
        )
    return _asr_chat(target, answer, body, marker)


def _whisper(
    target: Target,
    answer: Answer,
    body: TranscriptionRequest,
    task: Task,
    hearing: HearingInfo,
    aligner: ClipAligner | None,
) -> tuple[Whisper, TranscriptionOptions, float]:
    tokenizer, tokens = target.engine.inputs.require_tokenizer(), hearing.tokens
    before: list[int] = []
    if prompt := body.prompt.strip():
        found = tokenizer.encode(f" {prompt}", add_special_tokens=False)
        before = [token for token in found if token < tokens.end]  # text alone
    falls_back = target.server.config.transcription_fallback
    options = body.options(tokens.languages or ("en",), before, task, falls_back=falls_back)
    token_bytes = tokenizer.byte_table(skip_special_tokens=True)
    max_model_len = target.engine.info.max_model_len
    whisper = Whisper(answer, hearing, token_bytes, max_model_len, options, aligner)
    return whisper, options, hearing.seconds


def _asr_chat(
    target: Target, answer: Answer, body: TranscriptionRequest, marker: int
) -> tuple[ASRChat, TranscriptionOptions, float]:
    body.require_text_alone()
    # The server's default of fallback is for models such as Whisper.
    options = body.options(LANGUAGES, (), "transcribe", falls_back=False)
    inputs = target.engine.inputs
    tokenizer = inputs.require_tokenizer()
    ids = inputs.chat_prompt(conversation(body.prompt))
    if options.language is not None:
        header = language_header(options.language)
        ids += [*tokenizer.encode(header, add_special_tokens=False), marker]
    token_bytes = tokenizer.byte_table(skip_special_tokens=True)
    listener = ASRChat(answer, ids, marker, token_bytes, options)
    return listener, options, window_seconds(target.engine.info, len(ids))


def _not_transcribing_error(target: Target) -> InvalidRequestError:
    """Return the error for a model that does not transcribe."""
    if target.engine.info.sound is not None:
        return InvalidRequestError(
            f"{target.name} hears in chats: send sound to /v1/chat/completions, as input_audio.",
            param="model",
            code="model_not_supported",
        )
    others = [
        name for one in target.server.models if one.engine.inputs.transcribes for name in one.names
    ]
    hint = f" Send model as one of: {', '.join(others)}." if others else ""
    return InvalidRequestError(
        f"{target.name} does not hear: it takes no sound. Models such as Whisper do.{hint}",
        param="model",
        code="model_not_supported",
    )


async def _windows(target: Target, file: UploadedFile, seconds: float) -> Windows:
    """Return the windows of a file. Raises InvalidRequestError."""
    sound = target.server.sound
    assert sound is not None, "a model hears"
    samples = await asyncio.wrap_future(sound.decode(file.data, FILE))
    return await asyncio.to_thread(split_windows, samples, seconds)


class _EngineAnswer:
    """Lets a model answer the prompts of one transcript."""

    def __init__(self, target: Target, request_id: str) -> None:
        self._target = target
        self._name = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._count = 0

    async def __call__(
        self, prompt_token_ids: list[int], clip: Clip, params: SamplingParams, /
    ) -> AsyncGenerator[Delta, None]:
        prompt: TokensPrompt = {
            "prompt_token_ids": prompt_token_ids,
            "multi_modal_data": {"audio": clip},
        }
        id = f"{self._name}-{self._count}"
        self._count += 1
        stream = await self._target.engine.submit(
            prompt, params, request_id=id, adapter=self._target.adapter
        )
        try:
            async for delta in stream:
                if delta.finish_reason == "abort":  # the text would have a gap
                    raise EngineError("The transcription was ended by the server's operator.")
                yield delta
        finally:
            stream.close()


@dataclass(slots=True)
class _Work:
    """A request that is being transcribed."""

    body: TranscriptionRequest
    tokenizer: Tokenizer
    transcriber: Transcriber
    windows: Windows
    most_running: int  # windows
    transcript: Transcript
    timeout: float | None  # seconds
    metrics: Metrics
    num_tokens: int = 0  # that were generated so far

    async def response(self) -> Response:
        async with aclosing(self._parts()) as parts:
            async for _ in parts:
                pass
        name = self.body.response_format
        if name not in _TYPES:
            return Response(msgspec.json.encode(self._done()), media_type="application/json")
        if name == "text":
            text = to_text(self.transcript)
        else:
            text = (to_srt if name == "srt" else to_vtt)(self.transcript.segments)
        return Response(text, media_type=_TYPES[name])

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text as events, at last the complete transcript."""
        has_usage = self.body.stream_continuous_usage_stats
        if has_usage:
            yield event(DeltaEvent("", usage=self._usage()))
        async with aclosing(self._parts()) as parts:
            async for part in parts:
                found = DeltaEvent(part.text)
                if part.window is not None and self.body.include:
                    found.logprobs = self._logprobs([part.window])
                if has_usage:
                    found.usage = self._usage()
                if part.text or found.logprobs or found.usage:
                    yield event(found)
        done: dict[str, Any] = msgspec.to_builtins(self._done())
        yield event({"type": "transcript.text.done", **done}) + DONE

    async def _parts(self) -> AsyncGenerator[Part, None]:
        """Yield the parts of the transcript. Raises RequestTimeoutError if it takes too long.

        The engine's own limit of time applies to each window: a window is a request."""
        deadline = None
        if self.timeout is not None:
            deadline = asyncio.get_running_loop().time() + self.timeout
        found = self.transcriber.parts(self.windows, self.transcript, self.most_running)
        async with aclosing(found) as parts:
            while True:
                try:
                    async with asyncio.timeout_at(deadline):
                        part = await anext(parts)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise RequestTimeoutError(
                        f"The request did not finish within {self.timeout:g} s."
                    ) from None
                self.num_tokens += part.num_tokens
                if part.window is not None:
                    self.metrics.audio_seconds.inc(part.window.end - part.window.start)
                yield part

    def _done(self) -> Transcription | VerboseTranscription:
        body, transcript = self.body, self.transcript
        if body.response_format == "verbose_json":
            return to_verbose(transcript, segments=body.has_segments, words=body.has_words)
        logprobs = self._logprobs(transcript.windows) if body.include else None
        return Transcription(transcript.text, logprobs, usage_of(transcript.duration))

    def _logprobs(self, windows: Sequence[WindowText]) -> list[TokenLogprob]:
        names, byte_lists = self.tokenizer.token_names, self.tokenizer.byte_lists
        return [
            TokenLogprob(names[token], logprob, byte_lists[token])
            for window in windows
            for token, logprob in zip(window.tokens, window.logprobs, strict=True)
        ]

    def _usage(self) -> StreamUsage:
        """Return about how much is transcribed, also of windows whose text comes later."""
        done, total = self.transcriber.done.seconds, self.transcript.duration
        return StreamUsage(round(done, 3), round(total, 3), self.num_tokens)
