"""Segments of an answer by its timestamps."""

from __future__ import annotations

import pytest

from tests.speech.invented import BYTES, TOKENS, spelled
from toolkit.speech.segments import SpeechText, split_segments


def segments(*parts: str | float, start: float = 0.0, seconds: float = 30.0):
    found = split_segments([*spelled(*parts), TOKENS.end], TOKENS, BYTES, start, seconds)
    return [(round(one.start, 3), round(one.end, 3), one.text) for one in found]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        # pairs, and a timestamp at the end
        (
            (0.0, " One.", 2.0, 2.0, " Two.", 3.5, 3.5),
            [(0.0, 2.0, " One."), (2.0, 3.5, " Two.")],
        ),
        ((0.0, " One.", 2.0, 2.4, " Two.", 5.0), [(0.0, 2.0, " One."), (2.4, 5.0, " Two.")]),
        # an unfinished segment ends with the window
        ((0.0, " One.", 2.0, 2.0, " Two"), [(0.0, 2.0, " One."), (2.0, 30.0, " Two")]),
        ((1.0, " One"), [(1.0, 30.0, " One")]),
        ((1.0, " One", 4.0), [(1.0, 4.0, " One")]),
        ((" One",), [(0.0, 30.0, " One")]),
        # segments without text
        ((0.0, 2.0, 2.0, " ", 3.0, 3.0, " Two.", 4.0), [(3.0, 4.0, " Two.")]),
        ((0.0,), []),
        ((), []),
    ],
)
def test_segments_are_cut_between_two_timestamps(parts, expected):
    assert segments(*parts) == expected


def test_segments_are_shifted_by_the_start_of_their_window():
    assert segments(0.0, " One.", 2.0, start=29.5) == [(29.5, 31.5, " One.")]


def test_segments_end_with_their_window():
    found = segments(0.0, " One.", 2.0, 2.0, " Two.", 28.0, 29.0, " Three.", start=30, seconds=5)
    assert found == [(30, 32, " One."), (32, 35, " Two."), (35, 35, " Three.")]


def test_a_character_cut_between_segments_is_in_the_later_one():
    ids = [*spelled(0.0), 0xC3, *spelled(1.0, 1.0), 0xA4, *spelled(2.0)]
    found = split_segments(ids, TOKENS, BYTES, 0.0, 30.0)
    assert [one.text for one in found] == ["ä"]


def test_an_incomplete_character_at_the_end_is_replaced():
    text = SpeechText(BYTES, TOKENS)
    assert [text.add([0x61, 0xC3]), text.add((), is_last=True)] == ["a", "\ufffd"]


def test_special_tokens_are_no_text():
    every = dict.fromkeys(range(400), b"x")
    text = SpeechText(every, TOKENS)
    assert text.add([1, TOKENS.end, TOKENS.start, TOKENS.first_timestamp + 5, 2]) == "xx"
