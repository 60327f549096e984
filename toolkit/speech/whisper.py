"""Transcribe windows with Whisper, and judge its answers (arXiv:2212.04356)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from toolkit.errors import InvalidRequestError
from toolkit.sampling.params import SamplingParams
from toolkit.speech.alignment import Span, time_words
from toolkit.speech.clip import Clip
from toolkit.speech.languages import WITHOUT_SPACES
from toolkit.speech.segments import (
    Segment,
    SpeechText,
    finished_seconds,
    split_segments,
)
from toolkit.speech.tokens import HearingInfo
from toolkit.speech.transcriber import Answer, Part, TranscriptionOptions
from toolkit.speech.transcript import Scores, WindowText, Word, compression_ratio
from toolkit.speech.windows import TimedClip

# Thresholds of section 4.5.
MOST_COMPRESSION = 2.4
LEAST_LOGPROB = -1.0
MOST_NO_SPEECH = 0.6
TEMPERATURE_STEP = 0.2
MOST_TEMPERATURE = 1.0


class Aligner(Protocol):
    """Function that finds the times of the text after a prompt, in seconds of the clip."""

    async def __call__(
        self, clip: Clip, prompt_token_ids: list[int], text_token_ids: list[int], /
    ) -> Sequence[Span]: ...


@dataclass(slots=True)
class _Attempt:
    """A window's answer at one temperature, as it grows."""

    temperature: float
    token_ids: list[int] = field(default_factory=list)  # with the end token
    logprobs: list[float] = field(default_factory=list)
    text: str = ""

    def scores(self, no_speech_prob: float) -> Scores:
        mean = math.fsum(self.logprobs) / max(1, len(self.logprobs))
        return Scores(mean, compression_ratio(self.text), no_speech_prob)


class Whisper:
    """Implements `Listener` for models with `HearingInfo`."""

    def __init__(
        self,
        answer: Answer,
        hearing: HearingInfo,
        token_bytes: Mapping[int, bytes],
        max_model_len: int,
        options: TranscriptionOptions,
        aligner: Aligner | None = None,
    ) -> None:
        """token_bytes: the part of the text of each token, by id. aligner: finds the times of
        words, if they are wanted.

        Raises InvalidRequestError if the model cannot translate."""
        if options.task == "translate" and not hearing.tokens.is_multilingual:
            raise InvalidRequestError(
                "This model knows English alone, so it cannot translate. It can transcribe: "
                "/v1/audio/transcriptions, or tk transcribe without --translate."
            )
        self._answer, self._tokens, self._bytes = answer, hearing.tokens, token_bytes
        self._options, self._aligner = options, aligner
        self._most_previous = max_model_len // 2 - 1  # tokens, as in OpenAI's decoder
        self._needs_scores = options.has_scores or options.falls_back
        self.language = options.language or "en"
        self._temperatures = _temperatures(options)

    async def start(self, clip: Clip) -> None:
        if self._options.language is None and self._tokens.is_multilingual:
            self.language = await self._detect_language(clip)

    async def transcribe(
        self, window: TimedClip, previous: Sequence[int]
    ) -> AsyncGenerator[Part, None]:
        """Yield a window's text as it grows.

        With timestamps, a window that cuts off a phrase has no text of it: what is left of the
        window is one more."""
        start, clip = window
        while True:
            end = start + clip.seconds
            async with aclosing(self._transcribe_one(start, clip, previous)) as parts:
                async for part in parts:
                    end = part.window.end if part.window is not None else end
                    yield part
            if end >= start + clip.seconds:
                return
            start, clip = end, clip.after(end - start)
            if await self._no_speech_prob(clip, previous) > MOST_NO_SPEECH:
                yield Part("", WindowText(start=start, end=start + clip.seconds))
                return

    async def _transcribe_one(
        self, start: float, clip: Clip, previous: Sequence[int]
    ) -> AsyncGenerator[Part, None]:
        """Yield the text of one answer as it grows, at last with the window.

        With fallback the text comes at once, when it is accepted."""
        previous = previous[-self._most_previous :]
        no_speech = None
        if self._needs_scores:
            no_speech = asyncio.ensure_future(self._no_speech_prob(clip, previous))
        try:
            for temperature in self._temperatures:
                attempt, scores, num_sent = _Attempt(temperature), None, 0
                async with aclosing(self._attempt(attempt, clip, previous)) as texts:
                    async for text in texts:
                        if not self._options.falls_back:
                            num_new = len(attempt.token_ids) - num_sent
                            yield Part(text, num_tokens=num_new)
                            num_sent += num_new
                if no_speech is not None:
                    scores = attempt.scores(await no_speech)
                if scores is None or not _needs_another(scores):
                    break
        finally:
            if no_speech is not None:
                no_speech.cancel()
                await asyncio.gather(no_speech, return_exceptions=True)
        num_new = len(attempt.token_ids) - num_sent
        if self._options.falls_back:
            if scores is not None and _is_silent(scores):
                attempt = _Attempt(temperature)
            yield Part(attempt.text)
        yield Part("", await self._finished(attempt, start, clip, scores), num_new)

    async def _attempt(
        self, attempt: _Attempt, clip: Clip, previous: Sequence[int]
    ) -> AsyncGenerator[str, None]:
        """Yield the text of an answer as it grows."""
        options, text = self._options, SpeechText(self._bytes, self._tokens)
        prompt = self._tokens.prompt(
            self.language, options.task, timestamps=options.has_timestamps, previous=previous
        )
        has_logprobs = self._needs_scores or options.has_logprobs
        params = options.sampling(attempt.temperature, has_logprobs=has_logprobs)
        async with aclosing(self._answer(prompt, clip, params)) as parts:
            async for part in parts:
                attempt.token_ids += part.token_ids
                if part.logprobs is not None:
                    attempt.logprobs += part.logprobs.chosen()
                if added := text.add(part.token_ids):
                    attempt.text += added
                    yield added
        if rest := text.add((), is_last=True):
            attempt.text += rest
            yield rest

    async def _finished(
        self, attempt: _Attempt, start: float, clip: Clip, scores: Scores | None
    ) -> WindowText:
        """Return the window with its segments and words."""
        seconds = clip.seconds
        token_ids = [one for one in attempt.token_ids if one != self._tokens.end]
        segments: Sequence[Segment] = ()
        if self._options.has_timestamps:
            seconds = finished_seconds(token_ids, self._tokens, seconds)
            segments = split_segments(token_ids, self._tokens, self._bytes, start, seconds)
        return WindowText(
            start=start,
            end=start + seconds,
            text=attempt.text,
            tokens=token_ids,
            logprobs=attempt.logprobs[: len(token_ids)] if self._options.has_logprobs else (),
            segments=segments,
            words=await self._words(token_ids, start, clip, seconds),
            temperature=attempt.temperature,
            scores=scores,
        )

    async def _words(
        self, token_ids: list[int], start: float, clip: Clip, seconds: float
    ) -> list[Word]:
        """Return the words of an answer with their times in the file.

        They end within the first `seconds` of the clip."""
        text_ids = [token for token in token_ids if token < self._tokens.end]
        if self._aligner is None or not text_ids:
            return []
        prompt = self._tokens.prompt(self.language, self._options.task)
        spans = await self._aligner(clip, prompt, text_ids)
        language = self.language if self._options.task == "transcribe" else "en"
        words = time_words(text_ids, spans, self._bytes, has_spaces=language not in WITHOUT_SPACES)
        return [
            Word(one.text.strip(), start + min(one.start, seconds), start + min(one.end, seconds))
            for one in words
            if one.text.strip()
        ]

    async def _detect_language(self, clip: Clip) -> str:
        """Return the code of the likeliest language."""
        codes = {token: code for code, token in self._tokens.languages.items()}
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=sorted(codes), detokenize=False
        )
        found: list[int] = []
        async with aclosing(self._answer([self._tokens.start], clip, params)) as parts:
            async for part in parts:
                found += part.token_ids
        return codes[found[0]]

    async def _no_speech_prob(self, clip: Clip, previous: Sequence[int]) -> float:
        """Return the probability of <|nospeech|> after <|startoftranscript|>.

        It is that of a prompt's last token: no rules apply to prompts."""
        before = [self._tokens.previous, *previous] if previous else []
        prompt = [*before, self._tokens.start, self._tokens.no_speech]
        params = SamplingParams(max_tokens=0, prompt_logprobs=0, detokenize=False)
        logprobs: list[float] = []
        async with aclosing(self._answer(prompt, clip, params)) as parts:
            async for part in parts:
                if part.prompt_logprobs is not None:
                    logprobs += part.prompt_logprobs.chosen()
        return math.exp(logprobs[-1])


def _temperatures(options: TranscriptionOptions) -> list[float]:
    """Return the temperatures at which a window is transcribed until its answer is good."""
    first = options.temperature
    if not options.falls_back:
        return [first]
    num_steps = math.floor((MOST_TEMPERATURE - first) / TEMPERATURE_STEP + 1e-6)
    return [round(first + TEMPERATURE_STEP * step, 3) for step in range(num_steps + 1)]


def _is_silent(scores: Scores) -> bool:
    """Return True for a window without speech: its text is invented."""
    return scores.no_speech_prob > MOST_NO_SPEECH and scores.avg_logprob <= LEAST_LOGPROB


def _needs_another(scores: Scores) -> bool:
    """Return True for an answer that a higher temperature may improve."""
    if _is_silent(scores):
        return False
    return scores.avg_logprob < LEAST_LOGPROB or scores.compression_ratio > MOST_COMPRESSION
