"""Formats of transcripts. Field names are OpenAI's."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

import msgspec

from toolkit.speech.languages import language_name
from toolkit.speech.segments import Segment
from toolkit.speech.transcript import Transcript, WindowText

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
FORMATS: tuple[Format, ...] = get_args(Format)
TIMED_FORMATS = frozenset({"srt", "verbose_json", "vtt"})
"""Formats with times, which the model has to find."""
FRAMES_PER_SECOND = 100  # of the field `seek`
LEAST_CUE = 20  # milliseconds of a subtitle: the model's times have steps of as many


class DurationUsage(msgspec.Struct):
    """Sound of a request, in started seconds."""

    seconds: int
    type: Literal["duration"] = "duration"


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class Transcription(msgspec.Struct, omit_defaults=True):
    """The format json."""

    text: str
    logprobs: list[TokenLogprob] | None = None
    usage: DurationUsage | None = None


class TranscriptionSegment(msgspec.Struct):
    id: int
    seek: int  # start of the window, in hundredths of a second
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(msgspec.Struct):
    word: str
    start: float
    end: float


class VerboseTranscription(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The format verbose_json."""

    task: str
    language: str  # English name in lower case
    duration: float
    text: str
    segments: list[TranscriptionSegment] | None = None
    words: list[TranscriptionWord] | None = None
    usage: DurationUsage | None = None


def usage_of(duration: float) -> DurationUsage:
    return DurationUsage(math.ceil(round(duration, 3)))


def to_verbose(
    transcript: Transcript, *, segments: bool = True, words: bool = False
) -> VerboseTranscription:
    """Return the fields of verbose_json."""
    return VerboseTranscription(
        task=transcript.task,
        language=language_name(transcript.language),
        duration=round(transcript.duration, 3),
        text=transcript.text,
        segments=list(_verbose_segments(transcript.windows)) if segments else None,
        words=[
            TranscriptionWord(one.word, round(one.start, 3), round(one.end, 3))
            for window in transcript.windows
            for one in window.words
        ]
        if words
        else None,
        usage=usage_of(transcript.duration),
    )


def to_text(transcript: Transcript) -> str:
    return f"{transcript.text}\n"


def to_srt(segments: Iterable[Segment | TranscriptionSegment]) -> str:
    """Return subtitles in SubRip's format."""
    return "".join(
        f"{number}\n{_clock(start, ',')} --> {_clock(end, ',')}\n{text.replace('-->', '->')}\n\n"
        for number, (start, end, text) in enumerate(_cues(segments), 1)
    )


def to_vtt(segments: Iterable[Segment | TranscriptionSegment]) -> str:
    """Return subtitles in WebVTT's format."""
    return "WEBVTT\n\n" + "".join(
        f"{_clock(start, '.')} --> {_clock(end, '.')}\n{html.escape(text, quote=False)}\n\n"
        for start, end, text in _cues(segments)
    )


def _verbose_segments(windows: Sequence[WindowText]) -> Iterator[TranscriptionSegment]:
    id = 0
    for window in windows:
        for one in window.segments:
            assert window.scores is not None, "verbose_json asks for them"
            yield TranscriptionSegment(
                id,
                round(window.start * FRAMES_PER_SECOND),
                round(one.start, 3),
                round(one.end, 3),
                one.text,
                one.tokens,
                round(window.temperature, 3),
                window.scores.avg_logprob,
                window.scores.compression_ratio,
                window.scores.no_speech_prob,
            )
            id += 1


def _cues(
    segments: Iterable[Segment | TranscriptionSegment],
) -> Iterator[tuple[int, int, str]]:
    """Yield (begin, end, text) of subtitles, in milliseconds.

    They do not overlap, and the model's segments of no length last a moment: players skip those,
    and WebVTT forbids them."""
    last = 0
    for one in segments:
        start = max(round(1000 * one.start), last)
        last = max(round(1000 * one.end), start + LEAST_CUE)
        yield start, last, _line(one)


def _line(segment: Segment | TranscriptionSegment) -> str:
    """Return a segment's text in one line: an empty one would end the subtitle."""
    return " ".join(segment.text.split())


def _clock(milliseconds: int, point: str) -> str:
    """Return hours, minutes, seconds and milliseconds."""
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}{point}{rest % 1000:03}"
