from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.bench.load.arrivals import schedule
from toolkit.config.load import BenchConfig


def times(seed=0, **settings):
    return schedule(BenchConfig(**settings), seed)


def gaps(count=20_000, seed=1, **settings):
    return np.diff(times(seed, num_prompts=count, **settings))


class TestGaps:
    def test_are_exponential_with_the_mean_of_the_rate(self):
        found = gaps(request_rate=50.0)
        assert found.mean() == pytest.approx(1 / 50, rel=0.03)
        assert found.std() / found.mean() == pytest.approx(1.0, abs=0.05)  # Poisson
        assert (found > 2 / 50).mean() == pytest.approx(math.exp(-2), abs=0.01)

    @pytest.mark.parametrize("burstiness", [0.25, 0.5, 4.0, 25.0])
    def test_vary_like_a_gamma_distribution_of_that_shape(self, burstiness):
        found = gaps(request_rate=10.0, burstiness=burstiness)
        assert found.mean() == pytest.approx(1 / 10, rel=0.06)
        assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.06)

    def test_are_constant_with_infinite_burstiness(self):
        assert gaps(100, request_rate=20.0, burstiness=math.inf) == pytest.approx(0.05)

    def test_are_zero_within_a_burst_and_the_rate_counts_requests(self):
        found = times(request_rate=100.0, num_prompts=9_000, burst_size=9)
        together = found.reshape(-1, 9)
        assert np.all(together == together[:, :1])
        assert 9_000 / found[-1] == pytest.approx(100.0, rel=0.1)


class TestRamps:
    @pytest.mark.parametrize("strategy", ["linear", "exponential"])
    def test_by_number_each_gap_is_the_inverse_of_the_rate(self, strategy):
        found = times(
            num_prompts=101, burstiness=math.inf,
            ramp_up_strategy=strategy, ramp_up_start_rps=2.0, ramp_up_end_rps=50.0,
        )  # fmt: skip
        steps = np.diff(found, prepend=0.0)
        assert (1 / steps[0], 1 / steps[-1]) == pytest.approx((2.0, 50.0))
        middle = {"linear": 26.0, "exponential": 10.0}[strategy]  # arithmetic and geometric mean
        assert 1 / steps[50] == pytest.approx(middle)

    @pytest.mark.parametrize(("start", "end"), [(10.0, 40.0), (40.0, 10.0)])
    def test_by_time_the_count_is_the_integral_of_the_rate(self, start, end):
        ramp = {"ramp_up_start_rps": start, "ramp_up_end_rps": end, "duration": 100.0}
        linear = times(ramp_up_strategy="linear", **ramp)
        exponential = times(ramp_up_strategy="exponential", **ramp)
        assert len(linear) == pytest.approx(25.0 * 100, rel=0.06)
        assert len(exponential) == pytest.approx(30 / math.log(4) * 100, rel=0.06)
        half = 50 * (start + (start + end) / 2) / 2  # the integral over the first half
        assert (linear < 50).sum() == pytest.approx(half, rel=0.1)
        assert linear[-1] < 100.0


def test_schedule_depends_on_the_seed():
    first = times(3, request_rate=10.0, num_prompts=50)
    assert np.array_equal(first, times(3, request_rate=10.0, num_prompts=50))
    assert not np.array_equal(first, times(4, request_rate=10.0, num_prompts=50))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("burstiness", [0.05, 1.0, math.inf])
def test_duration_ends_the_schedule(seed, burstiness):
    found = times(seed, request_rate=100.0, duration=10.0, burstiness=burstiness)
    assert found[-1] < 10.0
    spread = 6 * math.sqrt(1000 / burstiness)
    assert len(found) == pytest.approx(1000, abs=max(spread, 2))
    assert np.all(np.diff(found) >= 0)


def test_schedule_ends_at_count_or_duration_whichever_is_first():
    assert len(times(request_rate=100.0, num_prompts=5, duration=10.0)) == 5
    assert times(request_rate=100.0, num_prompts=5000, duration=1.0)[-1] < 1.0


def test_infinite_rate_sends_everything_at_once():
    assert times(num_prompts=7).tolist() == [0.0] * 7
