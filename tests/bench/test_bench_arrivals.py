from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.bench.arrivals import arrival_times


def test_gaps_are_exponential_with_the_mean_of_the_rate():
    gaps = np.diff(arrival_times(50.0, count=20_000, seed=1))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.05)  # the coefficient of variation of Poisson
    assert (gaps > 2 / 50).mean() == pytest.approx(math.exp(-2), abs=0.01)


def test_the_same_seed_gives_the_same_schedule_and_another_seed_another():
    first = arrival_times(10.0, count=50, seed=3)
    assert np.array_equal(first, arrival_times(10.0, count=50, seed=3))
    assert not np.array_equal(first, arrival_times(10.0, count=50, seed=4))


@pytest.mark.parametrize("seed", range(20))
def test_a_duration_ends_the_schedule(seed):
    times = arrival_times(100.0, count=None, duration=10.0, seed=seed)
    assert times[-1] < 10.0
    assert len(times) == pytest.approx(1000, abs=200)
    assert np.all(np.diff(times) >= 0)


def test_of_count_and_duration_the_earlier_ends_the_schedule():
    assert len(arrival_times(100.0, count=5, duration=10.0)) == 5
    assert arrival_times(100.0, count=5000, duration=1.0)[-1] < 1.0


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(math.inf, count=7).tolist() == [0.0] * 7
