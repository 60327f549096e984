"""Rates of counters and quantiles of histograms, between two readings."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from toolkit.top.readings.reading import Histogram, Reading

HALVES = 7
"""Each half as many as before it: enough for the 99th percentile."""
Piece = tuple[float, float, float]  # above, up to, how many


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution in seconds; the values are None when nothing was observed."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    count: float


def increase(name: str, old: Reading | None, new: Reading) -> float | None:
    """How much a counter rose; since the server's start when `old` is None. None: no such counter."""
    now = new.numbers.get(name)
    if now is None:
        return None
    before = old.numbers.get(name, 0.0) if old is not None else 0.0
    return max(0.0, now - before)


def observed(name: str, old: Reading | None, new: Reading) -> Histogram:
    """What a histogram took in between two readings; since the server's start when `old` is None."""
    now = new.histograms.get(name, Histogram())
    before = old.histograms.get(name) if old is not None else None
    if before is None:
        return tightened(now)
    counts = {(above, up_to): count for above, up_to, count in before.pieces}
    pieces = [
        (above, up_to, count - counts.get((above, up_to), 0.0))
        for above, up_to, count in now.pieces
    ]
    found = Histogram(
        max(0.0, now.count - before.count),
        max(0.0, now.sum - before.sum),
        [piece for piece in pieces if piece[2] > 0],
    )
    return tightened(found)


def tightened(histogram: Histogram) -> Histogram:
    """The histogram with a first piece that goes with the sum of all observations.

    The others are at least at the low ends of their pieces; what is left of the sum is the most that the first may have.
    Where its mean is far below its middle, its observations are spread as those of an exponential distribution (the least
    that a mean says) instead of evenly: a first bucket of 300 ms holds all of a queue where nobody waits.
    """
    if not histogram.pieces or histogram.pieces[0][0] > 0:
        return histogram
    (_, up_to, count), *others = histogram.pieces
    left = max(0.0, histogram.sum - sum(above * number for above, _, number in others))
    half = math.log(2.0) * left / count
    if half * HALVES > up_to:
        return histogram
    shares = [count / 2**i for i in range(1, HALVES)]
    shares.append(shares[-1])
    first = [(i * half, (i + 1) * half, share) for i, share in enumerate(shares)]
    return Histogram(histogram.count, histogram.sum, [*first, *others])


def together(histograms: Iterable[Histogram]) -> Histogram:
    """Those of several servers as one. Their bounds may differ."""
    several = list(histograms)
    return Histogram(
        sum(one.count for one in several),
        sum(one.sum for one in several),
        [piece for one in several for piece in one.pieces],
    )


def latency(histogram: Histogram) -> Latency:
    """The distribution in short."""
    p50, p90, p99 = quantiles(histogram.pieces, (0.50, 0.90, 0.99))
    return Latency(p50, p90, p99, mean(histogram), histogram.count)


def mean(histogram: Histogram) -> float | None:
    """Of all observations; None when there are none."""
    return histogram.sum / histogram.count if histogram.count else None


def requests_per_step(told: Histogram, steps: Histogram, generated: float | None) -> float | None:
    """As the server tells it; else by the tokens of its steps, in which each running request gets one."""
    if told.count or not steps.count or generated is None:
        return mean(told)
    return generated / steps.count


def quantiles(pieces: Sequence[Piece], wanted: Sequence[float]) -> list[float | None]:
    """The quantiles `wanted`, ascending, of observations that are spread evenly within their piece.

    For the buckets of one histogram that is Prometheus' `histogram_quantile`. Pieces of several may overlap. All None
    when nothing was observed.
    """
    total = sum(count for _, _, count in pieces)
    if total <= 0:
        return [None] * len(wanted)
    slopes: defaultdict[float, float] = defaultdict(
        float
    )  # of the cumulative count, from this bound on
    opened: defaultdict[float, int] = defaultdict(
        int
    )  # pieces that begin here, less those that end
    steps: defaultdict[float, float] = defaultdict(float)  # of the cumulative count, at this bound
    for above, up_to, count in pieces:
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
        slope = (
            slope + slopes.get(bound, 0.0) if num_open else 0.0
        )  # without what rounding would leave
        last = bound
    return found + [last] * (
        len(wanted) - len(found)
    )  # those at the very end, which rounding has missed


def restarted(old: Reading, new: Reading) -> bool:
    """Whether the server's counters began anew in between, so that they cannot be subtracted.

    So it is, too, when one of several processes was replaced: then some counters only fall a little.
    """
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
