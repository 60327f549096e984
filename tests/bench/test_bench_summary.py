"""Percentiles and their confidence intervals, compared with brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from toolkit.bench.report.summary import Summary, _ranks


def percentile(values, share):
    """Interpolate linearly between the two nearest ranks."""
    values = sorted(values)
    rank = share * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1013])
def test_percentiles_follow_the_definition(count):
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    found = Summary.each(values, (50, 90, 99.9))
    assert found.mean.value == pytest.approx(sum(values) / count)
    assert found.std == pytest.approx(
        math.sqrt(sum((v - sum(values) / count) ** 2 for v in values) / count)
    )
    for percent, estimate in found.percentiles:
        assert estimate.value == pytest.approx(percentile(values, percent / 100))
    assert (found.min, found.max, found.count) == (min(values), max(values), count)


def test_no_values_have_no_summary():
    assert Summary.each([]) is None
    assert Summary.of([[], []]) is None


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("count", [1, 5, 40, 300, 368, 900])
def test_ranks_are_the_nearest_with_95_percent_coverage(count, share):
    low, high = _ranks(count, share)

    def probability_of_at_most(k):
        return sum(
            math.comb(count, i) * share**i * (1 - share) ** (count - i) for i in range(k + 1)
        )

    assert probability_of_at_most(low - 1) <= 0.025 < probability_of_at_most(low)
    assert probability_of_at_most(high - 1) >= 0.975 - 1e-9
    assert high == 0 or probability_of_at_most(high - 2) < 0.975


def test_normal_ranks_are_close_to_the_exact_ones():
    exact, normal = _ranks(5000, 0.99), _ranks(5001, 0.99)
    assert np.abs(np.subtract(exact, normal)).max() <= 3


def test_few_values_leave_the_tail_open():
    found = dict(Summary.each(list(range(100))).percentiles)
    assert found[99].high is None
    assert found[99].low is not None
    assert None not in (found[50].low, found[50].high)


def coverage(draw, truth, percent, rounds=400):
    """Return the fraction of experiments whose interval contains the true value."""
    hits = 0
    for seed in range(rounds):
        estimate = dict(draw(np.random.default_rng(seed)).percentiles)[percent]
        low = -math.inf if estimate.low is None else estimate.low
        high = math.inf if estimate.high is None else estimate.high
        hits += low <= truth <= high
    return hits / rounds


@pytest.mark.parametrize("percent", [50, 90])
def test_intervals_of_independent_values_have_95_percent_coverage(percent):
    truth = -math.log(1 - percent / 100)
    found = coverage(
        lambda rng: Summary.each(rng.exponential(size=200), (percent,)), truth, percent
    )
    assert 0.92 <= found <= 0.995


def test_values_of_one_request_are_correlated_and_count_as_fewer():
    """Each of 60 requests has its own pace, as in batches of different sizes."""

    def draw(rng):
        return Summary.of(
            [pace * rng.uniform(0.95, 1.05, 50) for pace in rng.exponential(size=60)], (50,)
        )

    def naive(rng):
        groups = [pace * rng.uniform(0.95, 1.05, 50) for pace in rng.exponential(size=60)]
        return Summary.each(np.concatenate(groups), (50,))

    truth = math.log(2)  # the median pace; 5 % of noise hardly changes it
    assert coverage(draw, truth, 50, 200) >= 0.9
    # The coverage if the values were treated as independent.
    assert coverage(naive, truth, 50, 200) <= 0.6


def test_error_of_grouped_values_is_that_of_the_group_means():
    rng = np.random.default_rng(0)
    groups = [np.full(10, value) for value in rng.normal(5.0, 1.0, 50)]
    found = Summary.of(groups).mean
    means = np.array([group[0] for group in groups])
    student = 2.0096  # 97.5th percentile with 49 degrees of freedom
    error = means.std(ddof=1) / math.sqrt(50)
    assert found.high - found.value == pytest.approx(student * error, rel=1e-3)
    assert Summary.of([[1.0, 2.0, 3.0]]).mean.low is None  # one group has no known error
