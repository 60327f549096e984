"""Windows of long sound: their length, and where they are cut."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.speech.windows import split_windows

RATE = 16_000


def brute_force(samples: np.ndarray, most: int) -> list[int]:
    """Return the starts of windows, found by the energy of every frame."""
    starts = [0]
    while len(samples) - starts[-1] > most:
        end = starts[-1] + most
        best = None
        for first in range(end - RATE, end - 1600 + 1, 100):
            energy = sum(int(one) ** 2 for one in samples[first : first + 1600])
            if best is None or energy <= best[0]:
                best = energy, first + 800
        assert best is not None
        starts.append(best[1])
    return starts


def test_windows_are_those_of_brute_force():
    random = np.random.default_rng(0)
    loudness = np.repeat(random.integers(0, 2, 90), 800)  # of words and pauses
    samples = (random.normal(0, 3000, loudness.size) * loudness).astype(np.int16)
    windows = split_windows(samples, seconds=2.0)
    assert [start * RATE for start, _ in windows] == brute_force(samples, 2 * RATE)
    joined = np.concatenate([clip.samples for _, clip in windows])
    np.testing.assert_array_equal(joined * 2**15, samples)
    assert all(clip.seconds <= 2.0 for _, clip in windows)


@pytest.mark.parametrize("kind", [np.int16, np.float32])
def test_window_ends_in_the_pause(kind: type):
    samples = np.full(40 * RATE, 1000, np.int16)
    samples[int(29.4 * RATE) : int(29.6 * RATE)] = 3
    samples = samples if kind is np.int16 else samples.astype(np.float32) / 2**15
    (_, first), (start, second) = split_windows(samples)
    assert start == first.seconds == pytest.approx(29.5, abs=0.051)
    assert second.seconds == 40 - start


@pytest.mark.parametrize(("size", "number"), [(0, 0), (1, 1), (480_000, 1), (480_001, 2)])
def test_sound_up_to_the_limit_is_one_window(size: int, number: int):
    assert len(split_windows(np.zeros(size, np.int16))) == number


def test_windows_of_silence_are_nearly_full():
    windows = split_windows(np.zeros(90 * RATE, np.int16))
    assert [clip.seconds for _, clip in windows] == pytest.approx([29.95] * 3 + [0.15])
