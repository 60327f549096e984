"""Summaries of distributions, each number with a 95 % confidence interval.

The interval of a percentile uses order statistics (Hahn and Meeker, Statistical Intervals, section
5.2). It assumes no shape, and is open at an end for which there are too few values. Values of one
group (tokens of a request, requests of the same seconds) are correlated, so they count as fewer, by
the design effect (Kish, Survey Sampling, section 5.4)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.load.record import Floats

PERCENTILES = (50.0, 90.0, 99.0)
NORMAL_95 = 1.959964  # half width of a 95 % interval in standard errors
Indices = NDArray[np.int64]  # group number of each value
MAX_EXACT = 5_000
"""Values up to which the binomial distribution is summed; beyond, a normal one approximates it."""


@dataclass(frozen=True, slots=True)
class IntervalEstimate:
    """A number and its interval. A bound is None if there are too few values."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a distribution in seconds."""

    count: int
    mean: IntervalEstimate
    std: float
    min: float
    max: float
    percentiles: tuple[tuple[float, IntervalEstimate], ...]  # (percent, value), ascending

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[float] | Floats], percentiles: Sequence[float] = PERCENTILES
    ) -> Summary | None:
        """Summarize groups of values, correlated within a group. Returns None if there are none.

        Percentiles interpolate linearly between the two nearest ranks."""
        sizes = [len(group) for group in groups]
        values = np.concatenate(
            [np.asarray(group, dtype=np.float64) for group in groups] or [np.empty(0)]
        )
        return cls._of(values, np.repeat(np.arange(len(sizes)), sizes), percentiles)

    @classmethod
    def each(
        cls, values: Sequence[float] | Floats, percentiles: Sequence[float] = PERCENTILES
    ) -> Summary | None:
        """Summarize independent values."""
        return cls._of(np.asarray(values, dtype=np.float64), np.arange(len(values)), percentiles)

    @classmethod
    def _of(cls, values: Floats, of_group: Indices, percentiles: Sequence[float]) -> Summary | None:
        if values.size == 0:
            return None
        mean = float(values.mean())
        spread = NORMAL_95 * _error_of_mean(values - mean, of_group)
        ordered = np.sort(values)
        found = []
        for percent in percentiles:
            value = float(np.percentile(ordered, percent))
            num_independent = _effective_count(values <= value, of_group)
            bounds = _interval(ordered, percent / 100, num_independent)
            found.append((percent, IntervalEstimate(value, *bounds)))
        bounds = (mean - spread, mean + spread) if math.isfinite(spread) else (None, None)
        return cls(
            count=int(values.size),
            mean=IntervalEstimate(mean, *bounds),
            std=float(values.std()),
            min=float(ordered[0]),
            max=float(ordered[-1]),
            percentiles=tuple(found),
        )

    def at(self, percent: float) -> float:
        return dict(self.percentiles)[percent].value

    def as_json(self) -> dict[str, Any]:
        """Return the summary under keys such as mean, p99 and p99_ci."""
        row: dict[str, Any] = {
            "count": self.count,
            "std": self.std,
            "min": self.min,
            "max": self.max,
        }
        for name, estimate in (("mean", self.mean), *((f"p{p:g}", e) for p, e in self.percentiles)):
            row[name] = estimate.value
            row[f"{name}_ci"] = [estimate.low, estimate.high]
        return row


def _error_of_mean(deviations: Floats, of_group: Indices) -> float:
    """Return the standard error of the mean of grouped values; infinite with one group.

    It is corrected so that NORMAL_95 times it is a 95 % interval also for few groups."""
    sums = np.bincount(of_group, deviations)[np.bincount(of_group) > 0]
    degrees = len(sums) - 1
    if degrees < 1:
        return math.inf
    error = math.sqrt(float((sums**2).sum()) * len(sums) / degrees) / len(deviations)
    return error * (1 + (NORMAL_95**2 + 1) / (4 * degrees))  # approximates Student's t


def _effective_count(below: NDArray[np.bool_], of_group: Indices) -> int:
    """Return the number of independent values that estimate the share of `below` equally well."""
    share = float(below.mean())
    if share in (0.0, 1.0):
        return len(np.unique(of_group))
    error = _error_of_mean(np.asarray(below - share, dtype=np.float64), of_group)
    if math.isinf(error):
        return 1
    if error == 0.0:
        return len(below)
    return max(1, min(len(below), round(share * (1 - share) / error**2)))


def _interval(ordered: Floats, share: float, count: int) -> tuple[float | None, float | None]:
    """Return the interval of a quantile of ascending values worth `count` independent ones."""
    low, high = _ranks(count, share)

    def at(rank: int) -> float:
        return float(np.quantile(ordered, (rank - 1) / max(count - 1, 1)))

    return (at(low) if low >= 1 else None), (at(high) if high <= count else None)


def _ranks(count: int, share: float) -> tuple[int, int]:
    """Return the ranks, from 1, of the order statistics around a quantile of `count` values.

    0 and `count` + 1 stand for minus and plus infinity."""
    if count > MAX_EXACT:
        spread = NORMAL_95 * math.sqrt(count * share * (1 - share))
        low, high = math.floor(count * share - spread), math.ceil(count * share + spread) + 1
        return max(low, 0), min(high, count + 1)
    k = np.arange(1, count + 1)
    steps = np.log((count - k + 1) / k) + math.log(share / (1 - share))
    log_probability = np.concatenate(([0.0], np.cumsum(steps))) + count * math.log(1 - share)
    # below[k]: the probability that at most k values are below the quantile
    below = np.cumsum(np.exp(log_probability))
    low = int(np.searchsorted(below, 0.025, side="right"))  # the first k with more than 2.5 %
    high = int(np.searchsorted(below, 0.975, side="left")) + 1
    return low, high
