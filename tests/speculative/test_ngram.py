"""Prompt lookup: which drafts follow."""

from __future__ import annotations

import random

import numpy as np
import pytest

from toolkit.kernels.drafts import look_up, match


def tokens(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def slow_match(text: list[int], tail: list[int], least: int, most: int) -> int:
    for length in range(min(most, len(tail)), least - 1, -1):
        for end in range(len(text), length - 1, -1):
            if text[end - length : end] == tail[len(tail) - length :]:
                return end
    return -1


def test_the_latest_of_the_longest_matches_is_found():
    rng = random.Random(0)
    for _ in range(2000):
        text = [rng.randrange(3) for _ in range(rng.randint(0, 12))]
        tail = [rng.randrange(3) for _ in range(rng.randint(0, 6))]
        least = rng.randint(1, 3)
        most = least + rng.randint(0, 2)
        found = match(tokens(*text), tokens(*tail), least, most)
        assert found == slow_match(text, tail, least, most), (text, tail, least, most)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 8, 1, 2, 3], [9, 8, 1, 2]),
        ([7, 7, 7], [7, 7, 7, 7]),  # a repetition goes on past the end
        ([5, 6, 5, 6, 5], [6, 5, 6, 5]),
        ([1, 2, 3, 4], []),
        ([4], []),
        ([], []),
    ],
)
def test_drafts_continue_the_match(text: list[int], expected: list[int]):
    assert look_up(tokens(*text), tokens(), 0, 4, (1, 3)).tolist() == expected


def test_predictions_come_first():
    text, prediction = tokens(1, 2, 3, 1, 2, 50, 51), tokens(50, 51, 52, 1, 2, 60, 61)
    # Two tokens of output, which begin the prediction.
    assert look_up(text, prediction, 5, 3, (2, 4)).tolist() == [52, 1, 2]
    # The output differs, but ends as a part of the prediction does.
    other = tokens(1, 2, 3, 50, 9, 1, 2)
    assert look_up(other, prediction, 3, 4, (2, 4)).tolist() == [60, 61]
    # It ends as its own beginning.
    assert look_up(tokens(8, 9, 3, 8, 9), prediction, 3, 2, (2, 4)).tolist() == [3, 8]
    # All of the prediction was said.
    assert look_up(tokens(9, 9, 9, 50), tokens(50), 3, 2, (1, 4)).tolist() == []
