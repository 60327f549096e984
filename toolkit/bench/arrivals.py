"""When requests arrive. The schedule exists before the first is sent, so that a slow send shifts no other."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


def arrival_times(
    rate: float, *, count: int | None, duration: float | None = None, seed: int = 0
) -> NDArray[np.float64]:
    """Seconds after the start, ascending, `[num_requests]`: a Poisson process of `rate` requests per second.

    It ends after `count` arrivals or before `duration` seconds, whichever comes first; one of them is given.
    An infinite rate puts all `count` arrivals at 0.
    """
    if math.isinf(rate):
        if count is None:
            raise ValueError("an infinite rate needs a count")
        return np.zeros(count)
    rng = np.random.default_rng(seed)
    if count is not None:
        times = np.cumsum(rng.exponential(1 / rate, count))
        return times if duration is None else times[times < duration]
    if duration is None:
        raise ValueError("a schedule needs a count or a duration")
    times = np.cumsum(rng.exponential(1 / rate, _enough(rate * duration)))
    while times[-1] < duration:
        times = np.append(times, times[-1] + np.cumsum(rng.exponential(1 / rate, _enough(rate * duration))))
    return times[times < duration]


def _enough(mean: float) -> int:
    """A number that a Poisson count of this mean hardly ever exceeds."""
    return math.ceil(mean + 6 * math.sqrt(mean) + 10)
