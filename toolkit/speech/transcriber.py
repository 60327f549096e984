"""Transcribe the windows of a file, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from toolkit.sampling.params import SamplingParams
from toolkit.speech.clip import Clip
from toolkit.speech.sound_done import SoundDone
from toolkit.speech.tokens import Task
from toolkit.speech.transcript import TextJoiner, Transcript, WindowText
from toolkit.speech.windows import TimedClip

MAX_RUNNING, MAX_RUNNING_ON_CPU = 64, 16
"""Windows of one file that the engine has at once. Shorter files wait for them, and a CPU is no
faster with more than 16: a short file then takes 0.7 instead of 2.7 s next to 23 windows."""

MOST_SURE_TEMPERATURE = 0.5
"""Highest temperature whose text the next window may follow."""


class Logprobs(Protocol):
    def chosen(self) -> Iterable[float]: ...


class AnswerPart(Protocol):
    """New tokens of an answer. Those of the engine are `Delta`s."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logprobs(self) -> Logprobs | None: ...
    @property
    def prompt_logprobs(self) -> Logprobs | None: ...


class Answer(Protocol):
    """Function that lets the model answer a prompt. Closing the generator ends the answer."""

    def __call__(
        self, prompt_token_ids: list[int], clip: Clip, params: SamplingParams, /
    ) -> AsyncGenerator[AnswerPart, None]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Wishes of a request."""

    language: str | None = None  # a code that the model knows. None: detect it
    task: Task = "transcribe"
    prompt: Sequence[int] = ()  # tokens of text before each window
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None  # of a window. None: to the end of the context
    ignores_end: bool = False  # windows have max_tokens tokens
    has_timestamps: bool = False
    has_logprobs: bool = False
    has_scores: bool = False
    follows_previous: bool = False
    """Each window is transcribed after the text of those before it, so one at a time."""
    falls_back: bool = False
    """Repeat answers that are unlikely or repetitive at higher temperatures, and leave out
    windows without speech."""

    def sampling(self, temperature: float, *, has_logprobs: bool) -> SamplingParams:
        """Return the parameters of an answer."""
        return SamplingParams(
            temperature=temperature,
            seed=self.seed,
            max_tokens=self.max_tokens,
            ends_with_context=True,
            ignore_eos=self.ignores_end,
            detokenize=False,
            logprobs=0 if has_logprobs else None,
        )


@dataclass(frozen=True, slots=True)
class Part:
    """Text that a transcript has grown by. window: set at the end of each window.

    language: as in `WindowText`."""

    text: str
    window: WindowText | None = None
    num_tokens: int = 0  # that were generated since the part before
    language: str | None = None


class Listener(Protocol):
    """A model that writes down what is said in one window of a file."""

    @property
    def language(self) -> str | None:
        """Code of the language that is spoken. None: parts with text have it."""

    async def start(self, clip: Clip) -> None:
        """Listen to the first window, for the language."""

    def transcribe(self, window: TimedClip, previous: Sequence[int]) -> AsyncGenerator[Part, None]:
        """Yield a window's text as it grows.

        The parts of a window may be those of several, one after the other, each with an end.
        previous: tokens of text before the window, which may grow."""


class Transcriber:
    """Makes one transcript."""

    def __init__(self, listener: Listener, options: TranscriptionOptions) -> None:
        self._listener, self._options = listener, options
        self.done = SoundDone(())

    async def parts(
        self, windows: Sequence[TimedClip], transcript: Transcript, most_running: int = MAX_RUNNING
    ) -> AsyncGenerator[Part, None]:
        """Yield the text as it grows, in order, and add the windows to a transcript.

        `most_running`: windows that the engine has at once. Later windows run while the text of
        earlier ones is yielded. Closing the generator ends all that runs."""
        await self._listener.start(windows[0][1])
        transcript.task = self._options.task
        language = self._listener.language
        if transcript.task == "transcribe":
            transcript.language = language or transcript.language
        joiner = TextJoiner(transcript.language)
        self.done = SoundDone([clip.seconds for _, clip in windows])
        one_by_one = self._options.follows_previous
        found = self._in_turn(windows) if one_by_one else self._together(windows, most_running)
        async with aclosing(found) as parts:
            async for part in parts:
                if part.window is not None:
                    transcript.windows.append(part.window)
                ends = part.window is not None
                text = joiner.add(part.text, language=part.language, is_last=ends)
                if language is None and text and part.language is not None:
                    transcript.language = language = part.language
                if text or part.window is not None or part.num_tokens:
                    yield replace(part, text=text)

    async def _in_turn(self, windows: Sequence[TimedClip]) -> AsyncGenerator[Part, None]:
        """Transcribe each window after the text of those before it."""
        previous = list(self._options.prompt)
        for index, window in enumerate(windows):
            async with aclosing(self._listener.transcribe(window, previous)) as parts:
                async for part in parts:
                    self.done.add(index, part.num_tokens, part.window)
                    if (done := part.window) is not None:
                        previous += done.tokens
                        if done.temperature > MOST_SURE_TEMPERATURE:
                            previous.clear()
                    yield part

    async def _together(
        self, windows: Sequence[TimedClip], most_running: int
    ) -> AsyncGenerator[Part, None]:
        """Transcribe many windows at once. Yields their parts in order."""
        running = asyncio.Semaphore(most_running)

        async def feed(index: int) -> None:
            queue = queues[index]
            end: Exception | None = None
            try:
                async with (
                    running,
                    aclosing(
                        self._listener.transcribe(windows[index], self._options.prompt)
                    ) as parts,
                ):
                    async for part in parts:
                        self.done.add(index, part.num_tokens, part.window)
                        queue.put_nowait(part)
            except Exception as error:
                end = error
            queue.put_nowait(end)

        queues: list[asyncio.Queue[Part | Exception | None]] = [
            asyncio.Queue() for _ in range(len(windows))
        ]
        tasks = [asyncio.ensure_future(feed(index)) for index in range(len(windows))]
        try:
            for queue in queues:
                while (part := await queue.get()) is not None:
                    if isinstance(part, Exception):
                        raise part
                    yield part
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
