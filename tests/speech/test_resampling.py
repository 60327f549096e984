"""Resampling to 16 kHz: what it keeps, what it removes, and pieces of any length."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import resample_poly

from tests.speech.files import tone
from toolkit.errors import InvalidRequestError
from toolkit.speech.resample import Resampler, resample

RATES = [8_000, 11_025, 22_050, 32_000, 44_100, 48_000, 96_000, 192_000, 8_001, 44_099]


def decibels(samples: np.ndarray, reference: np.ndarray) -> float:
    """Return the largest difference in the middle, of tones of half the full scale."""
    middle = slice(len(samples) // 4, -len(samples) // 4)
    return float(20 * np.log10(np.abs(samples - reference)[middle].max() / 0.5))


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("part", [0.01, 0.5, 0.875])
def test_tone_below_seven_kilohertz_is_kept(rate: int, part: float):
    frequency = part * min(rate, 16_000) / 2
    found = resample(tone(0.5, rate, frequency), rate)
    assert len(found) == -(-round(0.5 * rate) * 16_000 // rate)
    assert decibels(found, tone(len(found) / 16_000, 16_000, frequency)) < -60


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > 20_000])
@pytest.mark.parametrize("part", [0.0, 0.1, 0.9])
def test_tone_above_eight_kilohertz_is_removed(rate: int, part: float):
    frequency = 8_000 + part * (rate / 2 - 8_000)
    found = resample(tone(0.5, rate, frequency), rate)
    assert decibels(found, np.zeros_like(found)) < -70


@pytest.mark.parametrize("rate", [8_000, 44_100, 48_000])
def test_noise_is_like_that_of_another_resampler(rate: int):
    noise = np.random.default_rng(0).normal(0, 0.1, rate).astype(np.float32)
    narrow = resample_poly(resample_poly(noise, 1, 4), 4, 1)  # both filters are flat there
    narrow = narrow.astype(np.float32)[:rate]
    expected = resample_poly(narrow.astype(np.float64), 16_000, rate)
    found = resample(narrow, rate)
    assert np.abs(found - expected)[500:-500].max() < 0.002


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 44_099])
def test_pieces_give_the_samples_of_the_unsplit_sound(rate: int):
    noise = np.random.default_rng(0).normal(0, 0.1, rate + 7).astype(np.float32)
    cuts = np.sort(np.random.default_rng(1).integers(0, len(noise), 30))
    resampler = Resampler(rate)
    found = [resampler.feed(piece) for piece in np.split(noise, cuts)]
    joined = np.concatenate([*found, resampler.finish()])
    np.testing.assert_allclose(joined, resample(noise, rate), atol=1e-6)


@pytest.mark.parametrize("rate", [0, 999, 384_001])
def test_rate_beyond_the_limits_is_refused(rate: int):
    with pytest.raises(InvalidRequestError, match=r"1,000 to 384,000 are supported"):
        resample(np.zeros(10), rate)
