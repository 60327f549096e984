"""Rates of counters and quantiles of histograms, between two readings."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolkit.top.readings.reading import Histogram, Reading

HALVES = 7  # parts of a split bucket, each with half the count of the one before: enough for p99
Bucket = tuple[float, float, float]  # above, up to, count


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution in seconds. Values are None without observations."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    count: float


def counter_increase(name: str, old: Reading | None, new: Reading) -> float | None:
    """Return the increase of a counter, since the server's start if `old` is None.

    None: there is no such counter."""
    now = new.numbers.get(name)
    if now is None:
        return None
    before = old.numbers.get(name, 0.0) if old is not None else 0.0
    return max(0.0, now - before)


def histogram_increase(name: str, old: Reading | None, new: Reading) -> Histogram:
    """Return the observations between two readings, since the server's start if `old` is None."""
    now = new.histograms.get(name, Histogram())
    before = old.histograms.get(name) if old is not None else None
    if before is None:
        return refine_first_bucket(now)
    counts = {(above, up_to): count for above, up_to, count in before.buckets}
    buckets = [
        (above, up_to, count - counts.get((above, up_to), 0.0))
        for above, up_to, count in now.buckets
    ]
    found = Histogram(
        max(0.0, now.count - before.count),
        max(0.0, now.sum - before.sum),
        [bucket for bucket in buckets if bucket[2] > 0],
    )
    return refine_first_bucket(found)


def refine_first_bucket(histogram: Histogram) -> Histogram:
    """Split the first bucket where the sum of all observations shows that it is too coarse.

    The other buckets hold at least their lower bounds, so the rest of the sum is the most that the
    first one can hold. If the mean in it is far below its middle, its observations are distributed
    exponentially (the least assumption for a known mean) instead of evenly. For example, a first
    bucket of 300 ms has all waits of an empty queue."""
    if not histogram.buckets or histogram.buckets[0][0] > 0:
        return histogram
    (_, up_to, count), *others = histogram.buckets
    left = max(0.0, histogram.sum - sum(above * number for above, _, number in others))
    half = math.log(2.0) * left / count
    if half * HALVES > up_to:
        return histogram
    counts = [count / 2**i for i in range(1, HALVES)]
    counts.append(counts[-1])
    first = [(i * half, (i + 1) * half, number) for i, number in enumerate(counts)]
    return Histogram(histogram.count, histogram.sum, [*first, *others])


def add_up(histograms: Iterable[Histogram]) -> Histogram:
    """Add the histograms of several servers. Their bounds may differ."""
    several = list(histograms)
    return Histogram(
        sum(one.count for one in several),
        sum(one.sum for one in several),
        [bucket for one in several for bucket in one.buckets],
    )


def summarize(histogram: Histogram) -> Latency:
    p50, p90, p99 = quantiles(histogram.buckets, (0.50, 0.90, 0.99))
    return Latency(p50, p90, p99, mean(histogram), histogram.count)


def mean(histogram: Histogram) -> float | None:
    """Return the mean of all observations, or None without any."""
    return histogram.sum / histogram.count if histogram.count else None


def requests_per_step(
    batch_sizes: Histogram, steps: Histogram, generated: float | None
) -> float | None:
    """Return the mean batch size.

    Without a histogram of it, take generated tokens per step: each running request gets one."""
    if batch_sizes.count or not steps.count or generated is None:
        return mean(batch_sizes)
    return generated / steps.count


def quantiles(buckets: Sequence[Bucket], wanted: Sequence[float]) -> list[float | None]:
    """Return the quantiles `wanted`, ascending, of observations spread evenly in their buckets.

    For one histogram, this is Prometheus' `histogram_quantile`. Buckets of several may overlap.
    All are None without observations."""
    total = sum(count for _, _, count in buckets)
    if total <= 0:
        return [None] * len(wanted)
    # By bound: slope of the cumulative count from it on, buckets that begin less those that end,
    # and steps of the cumulative count.
    slopes: defaultdict[float, float] = defaultdict(float)
    opened: defaultdict[float, int] = defaultdict(int)
    steps: defaultdict[float, float] = defaultdict(float)
    for above, up_to, count in buckets:
        if up_to > above:
            slopes[above] += count / (up_to - above)
            slopes[up_to] -= count / (up_to - above)
            opened[above] += 1
            opened[up_to] -= 1
        else:
            steps[up_to] += count
    found: list[float | None] = []
    below = slope = last = 0.0
    num_open = 0
    for bound in sorted(slopes.keys() | steps.keys()):
        reached = below + slope * (bound - last)
        while len(found) < len(wanted) and slope > 0 and wanted[len(found)] * total <= reached:
            found.append(min(bound, last + (wanted[len(found)] * total - below) / slope))
        below = reached + steps.get(bound, 0.0)
        while len(found) < len(wanted) and bound in steps and wanted[len(found)] * total <= below:
            found.append(bound)
        num_open += opened.get(bound, 0)
        # Outside all buckets the slope is 0; rounding would leave a rest.
        slope = slope + slopes.get(bound, 0.0) if num_open else 0.0
        last = bound
    # Rounding can miss quantiles at the very end.
    return found + [last] * (len(wanted) - len(found))


def has_restarted(old: Reading, new: Reading) -> bool:
    """Return True if counters restarted in between, so that they cannot be subtracted.

    When one of several processes is replaced, some counters only fall a little."""
    if old.start_time != new.start_time and None not in (old.start_time, new.start_time):
        return True
    counters = (
        name for name in old.numbers if name.endswith("_total") and not name.startswith("process_")
    )
    if any(new.numbers.get(name, 0.0) < old.numbers[name] for name in counters):
        return True
    none = Histogram()
    return any(
        new.histograms.get(name, none).count < one.count for name, one in old.histograms.items()
    )
