"""A transcript: the windows of a file with their text, in order."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from toolkit.speech.languages import WITHOUT_SPACES
from toolkit.speech.segments import Segment
from toolkit.speech.tokens import Task


@dataclass(frozen=True, slots=True)
class Word:
    """A word and its time, in seconds of the file."""

    word: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Scores:
    """Measures of a window's answer (arXiv:2212.04356, section 4.5)."""

    avg_logprob: float  # mean log-probability of its tokens
    compression_ratio: float  # size of its text, divided by its size after zlib
    no_speech_prob: float  # probability of <|nospeech|> instead of an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowText:
    """Answer to one window."""

    start: float  # seconds
    end: float
    text: str = ""
    tokens: Sequence[int] = ()  # without the end token
    logprobs: Sequence[float] = ()  # of the tokens; empty if they are not asked for
    segments: Sequence[Segment] = ()  # empty without timestamps
    words: Sequence[Word] = ()
    temperature: float = 0.0
    scores: Scores | None = None  # None if they are not asked for
    language: str | None = None  # code; None: that of the transcript


@dataclass(slots=True)
class Transcript:
    """The windows so far. duration: seconds of the file. language: code of the first text's."""

    duration: float
    task: Task = "transcribe"
    language: str = "en"
    windows: list[WindowText] = field(default_factory=list)

    @property
    def text(self) -> str:
        joiner = TextJoiner(self.language)
        return "".join(
            joiner.add(window.text, language=window.language, is_last=True)
            for window in self.windows
        )

    @property
    def segments(self) -> list[Segment]:
        return [segment for window in self.windows for segment in window.segments]


class TextJoiner:
    """Joins the texts of windows, with a space in between unless both languages need none.

    The joined text neither begins nor ends with a space."""

    def __init__(self, language: str) -> None:
        """language: of windows whose language is not known."""
        self._language = language
        self._needs_spaces = True  # the window before
        self._held = ""  # spaces at the end of the text
        self._has_text = False
        self._window_ended = False

    def add(self, text: str, *, language: str | None = None, is_last: bool = False) -> str:
        """Return what a part of a window's text adds. is_last: the window ends with it."""
        added = ""
        if text:
            needs_spaces = (language or self._language) not in WITHOUT_SPACES
            needs_space = self._window_ended and (needs_spaces or self._needs_spaces)
            if needs_space and not self._held and not text[0].isspace():
                text = f" {text}"
            self._window_ended, self._needs_spaces = False, needs_spaces
            text = self._held + text
            added = text.rstrip()
            self._held = text[len(added) :]
            if not self._has_text:
                added = added.lstrip()
                self._has_text = bool(added)
                self._held = self._held if self._has_text else ""
        self._window_ended = self._window_ended or is_last
        return added


def compression_ratio(text: str) -> float:
    """Return the size of a text by its compressed size: above 2.4, it repeats itself."""
    data = text.strip().encode()
    return len(data) / len(zlib.compress(data))
