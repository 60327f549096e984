"""Formats of transcripts: OpenAI's fields, subtitles."""

from __future__ import annotations

import math
import re

import msgspec
import openai.types.audio as official
import pytest

from toolkit.speech.formats import Transcription, to_srt, to_text, to_verbose, to_vtt, usage_of
from toolkit.speech.segments import Segment
from toolkit.speech.transcript import Scores, Transcript, WindowText, Word, compression_ratio

SEGMENTS = [
    Segment(0.0, 2.5, " Ham & eggs <b>", [1, 2]),
    Segment(3725.004, 3726.0, " -->\n second line ", [3]),
]
SCORES = Scores(-0.25, 1.5, 0.125)


def transcript() -> Transcript:
    windows = [
        WindowText(
            start=start,
            end=start + 29.5,
            text=segment.text,
            tokens=segment.tokens,
            segments=[segment],
            temperature=0.2,
            scores=SCORES,
            words=[Word("Ham", 0.0, 0.5)] if start == 0 else [],
        )
        for start, segment in zip((0.0, 3700.5), SEGMENTS, strict=True)
    ]
    return Transcript(3730.0004, language="de", windows=windows)


def test_text_ends_with_a_newline():
    assert (
        to_text(Transcript(1.0, windows=[WindowText(start=0.0, end=1.0, text=" Yes. ")]))
        == "Yes.\n"
    )


def test_srt_has_numbers_times_and_lines():
    assert to_srt(SEGMENTS) == (
        "1\n00:00:00,000 --> 00:00:02,500\nHam & eggs <b>\n\n"
        "2\n01:02:05,004 --> 01:02:06,000\n-> second line\n\n"
    )


def test_vtt_escapes_its_markup():
    assert to_vtt(SEGMENTS) == (
        "WEBVTT\n\n"
        "00:00:00.000 --> 00:00:02.500\nHam &amp; eggs &lt;b&gt;\n\n"
        "01:02:05.004 --> 01:02:06.000\n--&gt; second line\n\n"
    )


def test_subtitles_last_a_moment_and_do_not_overlap():
    times = [(0.0, 1.0006), (1.0004, 2.0), (2.0, 2.0), (2.0, 2.01), (2.01, 3.0), (5.0, 6.0)]
    vtt = to_vtt(Segment(start, end, " a", []) for start, end in times)
    cues = re.findall(r"00:00:0(\d\.\d+) --> 00:00:0(\d\.\d+)", vtt)
    assert [(float(begin), float(end)) for begin, end in cues] == [
        (0.0, 1.001), (1.001, 2.0), (2.0, 2.02), (2.02, 2.04), (2.04, 3.0), (5.0, 6.0),
    ]  # fmt: skip


def test_subtitles_of_silence_are_empty():
    assert (to_srt([]), to_vtt([])) == ("", "WEBVTT\n\n")


def test_verbose_json_has_the_fields_of_openai():
    encoded = msgspec.json.encode(to_verbose(transcript(), words=True))
    found = official.TranscriptionVerbose.model_validate_json(encoded, strict=True)
    assert not found.model_extra or set(found.model_extra) == {"task"}
    assert (found.language, found.duration) == ("german", 3730.0)
    assert found.usage.seconds == 3730
    assert [one.word for one in found.words] == ["Ham"]
    first, second = found.segments
    assert set(official.TranscriptionSegment.model_fields) == set(first.model_dump())
    assert (first.id, first.seek, second.id, second.seek) == (0, 0, 1, 370050)
    assert (second.start, second.end, second.tokens) == (3725.004, 3726.0, [3])
    assert (first.temperature, first.avg_logprob, first.no_speech_prob) == (0.2, -0.25, 0.125)


def test_verbose_json_may_have_words_alone():
    found = msgspec.to_builtins(to_verbose(transcript(), segments=False, words=True))
    assert "segments" not in found
    assert found["words"] == [{"word": "Ham", "start": 0.0, "end": 0.5}]


def test_json_has_the_text_and_the_usage():
    found = msgspec.to_builtins(Transcription("Yes.", usage=usage_of(2.2)))
    assert found == {"text": "Yes.", "usage": {"type": "duration", "seconds": 3}}
    assert official.Transcription.model_validate(found, strict=True).usage.type == "duration"


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, 0), (30.0, 30), (30.0001, 30), (0.1, 1)])
def test_usage_is_in_started_seconds(seconds, expected):
    assert usage_of(seconds).seconds == expected


def test_compression_ratio_shows_repetitions():
    assert compression_ratio("") == 0.0
    assert compression_ratio("The quick brown fox jumps over it.") < 1.2
    assert compression_ratio(" and so on" * 20) > 2.4
    assert math.isfinite(compression_ratio("ä"))
