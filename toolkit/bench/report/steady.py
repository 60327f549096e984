"""Steady part of a run: after the load has built up and before it drains."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.bench.load.record import Floats, RequestRecord
from toolkit.bench.report.summary import IntervalEstimate

NUM_BINS = 60  # time bins, each with its mean number of requests in flight
MIN_SECONDS = 1.0  # of a steady window
NUM_BATCHES = 10
STUDENT_95 = 2.262157
"""Half width of a 95 % interval in standard errors: Student's t with nine degrees of freedom."""


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """A time range in seconds after the start of the measurement."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __contains__(self, moment: float | None) -> bool:
        return moment is not None and self.start <= moment < self.end


def steady_window(records: Sequence[RequestRecord]) -> TimeWindow | None:
    """Return the window from the end of the build-up to the last send, or None if there is none.

    The build-up ends where MSER (White, An Effective Truncation Heuristic for Bias Reduction in
    Simulation Output, 1997) cuts, so that the mean number of requests in flight has the smallest
    error. A run that would lose half of its time was never steady."""
    sent = [r.sent for r in records if r.sent is not None]
    if not sent or max(sent) - min(sent) < MIN_SECONDS:
        return None
    edges = np.linspace(min(sent), max(sent), NUM_BINS + 1)
    running = in_flight(records, edges)
    errors = [
        ((tail := running[cut:]) - tail.mean()).var() / len(tail)
        for cut in range(NUM_BINS // 2 + 1)
    ]
    cut = int(np.argmin(errors))
    window = TimeWindow(float(edges[cut]), float(edges[-1]))
    return window if cut < NUM_BINS // 2 and window.seconds >= MIN_SECONDS else None


def in_flight(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """Return the mean number of requests in flight in each bin, `[len(edges) - 1]`."""

    def elapsed(times: list[float]) -> Floats:
        """Return, at each edge, the sum of the seconds since all earlier times."""
        ordered = np.sort(np.array(times))
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        before = np.searchsorted(ordered, edges)
        return edges * before - sums[before]

    started = elapsed([r.sent for r in records if r.sent is not None])
    ended = elapsed([r.ended for r in records if r.sent is not None and r.ended is not None])
    return np.diff(started - ended) / np.diff(edges)


def tokens_between(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """Return the tokens of each bin, `[len(edges) - 1]`, without those of failed requests."""
    pairs = [record.token_times() for record in records if record.error is None]
    if not pairs:
        return np.zeros(len(edges) - 1)
    times = np.concatenate([pair[0] for pair in pairs])
    return np.histogram(times, edges, weights=np.concatenate([pair[1] for pair in pairs]))[0]


def rate(amounts: Floats, seconds: float) -> IntervalEstimate:
    """Return the rate per second, by batch means over ten equal parts of `seconds`."""
    each = amounts * NUM_BATCHES / seconds
    mean, spread = float(each.mean()), STUDENT_95 * float(each.std(ddof=1)) / NUM_BATCHES**0.5
    return IntervalEstimate(mean, mean - spread, mean + spread)


def batch_edges(window: TimeWindow) -> Floats:
    """Split the window into ten equal parts."""
    return np.linspace(window.start, window.end, NUM_BATCHES + 1)
