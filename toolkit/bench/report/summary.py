"""Distributions in a few numbers, each with the interval that it lies in with 95 % confidence.

A percentile's interval is that of order statistics (Hahn and Meeker, Statistical Intervals, section 5.2): it takes no
shape for granted, and is open at the end where there are too few values to tell. Values of one group (tokens of a
request, requests of the same seconds) resemble each other; they count as fewer, by the design effect (Kish, Survey
Sampling, section 5.4).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toolkit.bench.load.record import Floats

PERCENTILES = (50.0, 90.0, 99.0)
NORMAL_95 = 1.959964
"""Standard errors on either side of a mean."""
Indices = NDArray[np.int64]
"""The number of each value's group."""
EXACT = 5_000
"""Values up to which the binomial distribution is summed up; it is the normal one beyond."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its interval. A bound is None where the values cannot tell."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """A distribution, in seconds."""

    count: int
    mean: Estimate
    std: float
    min: float
    max: float
    percentiles: tuple[tuple[float, Estimate], ...]
    """(per cent, value), ascending."""

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[float] | Floats], percentiles: Sequence[float] = PERCENTILES
    ) -> Summary | None:
        """Of the values in all groups, those of one group resembling each other; None when there are none.

        Percentiles interpolate linearly between the two nearest ranks.
        """
        sizes = [len(group) for group in groups]
        values = np.concatenate(
            [np.asarray(group, dtype=np.float64) for group in groups] or [np.empty(0)]
        )
        return cls._of(values, np.repeat(np.arange(len(sizes)), sizes), percentiles)

    @classmethod
    def each(
        cls, values: Sequence[float] | Floats, percentiles: Sequence[float] = PERCENTILES
    ) -> Summary | None:
        """Of values that are independent of each other."""
        return cls._of(np.asarray(values, dtype=np.float64), np.arange(len(values)), percentiles)

    @classmethod
    def _of(cls, values: Floats, of_group: Indices, percentiles: Sequence[float]) -> Summary | None:
        if values.size == 0:
            return None
        mean = float(values.mean())
        spread = NORMAL_95 * _error_of_mean(values - mean, of_group)
        known = math.isfinite(spread)
        ordered = np.sort(values)
        found = []
        for percent in percentiles:
            value = float(np.percentile(ordered, percent))
            worth = _independent(values <= value, of_group)
            found.append((percent, Estimate(value, *_interval(ordered, percent / 100, worth))))
        return cls(
            count=int(values.size),
            mean=Estimate(mean, mean - spread, mean + spread) if known else Estimate(mean),
            std=float(values.std()),
            min=float(ordered[0]),
            max=float(ordered[-1]),
            percentiles=tuple(found),
        )

    def at(self, percent: float) -> float:
        """One of the percentiles."""
        return dict(self.percentiles)[percent].value

    def as_json(self) -> dict[str, Any]:
        """Under keys such as mean, p99 and p99_ci."""
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
    """The standard error of the mean of values in groups, such that NORMAL_95 times it is a 95 % interval also where
    groups are few; infinite with one group.
    """
    sums = np.bincount(of_group, deviations)[np.bincount(of_group) > 0]
    degrees = len(sums) - 1
    if degrees < 1:
        return math.inf
    error = math.sqrt(float((sums**2).sum()) * len(sums) / degrees) / len(deviations)
    return error * (1 + (NORMAL_95**2 + 1) / (4 * degrees))  # Student's t, nearly


def _independent(below: NDArray[np.bool_], of_group: Indices) -> int:
    """How many independent values would tell the share of those `below` as well as these in groups do."""
    share = float(below.mean())
    if share in (0.0, 1.0):
        return len(np.unique(of_group))
    error = _error_of_mean(np.asarray(below - share, dtype=np.float64), of_group)
    if math.isinf(error):
        return 1
    return (
        len(below)
        if error == 0.0
        else max(1, min(len(below), round(share * (1 - share) / error**2)))
    )


def _interval(ordered: Floats, share: float, worth: int) -> tuple[float | None, float | None]:
    """Where the quantile of that share lies, of ascending values that are `worth` as many independent ones."""
    low, high = _ranks(worth, share)

    def at(rank: int) -> float:
        return float(np.quantile(ordered, (rank - 1) / max(worth - 1, 1)))

    return (at(low) if low >= 1 else None), (at(high) if high <= worth else None)


def _ranks(count: int, share: float) -> tuple[int, int]:
    """The order statistics, from 1, between which a quantile of `count` values lies: 0 and `count` + 1 are the ends of
    the line.
    """
    if count > EXACT:
        spread = NORMAL_95 * math.sqrt(count * share * (1 - share))
        low, high = math.floor(count * share - spread), math.ceil(count * share + spread) + 1
        return max(low, 0), min(high, count + 1)
    k = np.arange(1, count + 1)
    steps = np.log((count - k + 1) / k) + math.log(share / (1 - share))
    log_chance = np.concatenate(([0.0], np.cumsum(steps))) + count * math.log(1 - share)
    below = np.cumsum(
        np.exp(log_chance)
    )  # below[k]: the chance that at most k values are below the quantile
    low = int(np.searchsorted(below, 0.025, side="right"))  # the first k with more than 2.5 %
    high = int(np.searchsorted(below, 0.975, side="left")) + 1
    return low, high
