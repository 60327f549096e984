"""A model that hears, without an engine: its vocabulary is bytes, and a function answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from toolkit.sampling.params import SamplingParams
from toolkit.speech.clip import SAMPLE_RATE, Clip
from toolkit.speech.tokens import HearingInfo, SpeechTokens

BYTES = {token: bytes([token]) for token in range(256)}
TOKENS = SpeechTokens(
    end=256,
    start=257,
    languages={"en": 258, "de": 259, "ja": 260},
    translate=261,
    transcribe=262,
    previous=263,
    no_speech=264,
    no_timestamps=265,
    first_timestamp=266,
)
ENGLISH = SpeechTokens(
    end=256, start=257, previous=258, no_speech=259, no_timestamps=260, first_timestamp=261
)
HEARING = HearingInfo(tokens=TOKENS)


def clip_of(seconds: float, number: int = 0) -> Clip:
    """Return a clip whose samples are `number`."""
    return Clip.of(np.full(round(seconds * SAMPLE_RATE), number, np.int16))


def number_of(clip: Clip) -> int:
    return round(float(clip.samples[0]) * 2**15)


def spelled(*parts: str | float, tokens: SpeechTokens = TOKENS) -> list[int]:
    """Return the tokens of texts, and of timestamps in seconds."""
    found: list[int] = []
    for part in parts:
        if isinstance(part, str):
            found += part.encode()
        else:
            found.append(tokens.first_timestamp + round(part / 0.02))
    return found


@dataclass(frozen=True)
class Logprobs:
    values: Sequence[float]

    def chosen(self) -> Sequence[float]:
        return self.values


@dataclass(frozen=True)
class Delta:
    token_ids: list[int]
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    finish_reason: str | None = None


@dataclass
class Heard:
    """A request to the model."""

    prompt: list[int]
    clip: Clip
    params: SamplingParams
    is_closed: bool = False


@dataclass
class FakeModel:
    """Answers a request by `reply`, one token at a time. It keeps the requests.

    reply: returns tokens without the end, and the log-probability of each."""

    reply: Callable[[Heard], tuple[Sequence[int], float]]
    no_speech_logprob: float = -10.0
    language: int = 259
    pause: float = 0.0  # seconds before each token
    heard: list[Heard] = field(default_factory=list)
    num_running: int = 0
    most_running: int = 0

    async def __call__(
        self, prompt: list[int], clip: Clip, params: SamplingParams, /
    ) -> AsyncGenerator[Delta, None]:
        one = Heard(prompt, clip, params)
        self.heard.append(one)
        await asyncio.sleep(0)
        if params.allowed_token_ids is not None:
            assert self.language in params.allowed_token_ids
            yield Delta([self.language])
            return
        if params.prompt_logprobs is not None:
            assert params.max_tokens == 0
            logprobs = [*[-9.0] * (len(prompt) - 2), self.no_speech_logprob]
            yield Delta([], prompt_logprobs=Logprobs(logprobs))
            return
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            tokens, logprob = self.reply(one)
            for token in [*tokens, 256]:
                await asyncio.sleep(self.pause)
                logprobs = None if params.logprobs is None else Logprobs([logprob])
                yield Delta([token], logprobs)
        finally:
            self.num_running -= 1
            one.is_closed = True

    @property
    def answers(self) -> list[Heard]:
        """Requests for text."""
        return [one for one in self.heard if one.params.max_tokens not in (0, 1)]
