"""The part of a run in which the server was in its stride: after the load has built up, before it runs out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from toolkit.bench.load.record import Floats, RequestRecord
from toolkit.bench.report.summary import Estimate

BINS = 60
"""Parts of the loaded time, each with its mean number of requests in flight."""
SHORTEST = 1.0
"""Seconds: shorter windows say nothing."""
BATCHES = 10
STUDENT_95 = 2.262157
"""Standard errors on either side of the mean of ten batches: Student's t with nine degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Window:
    """From `start` to `end`, in seconds after the beginning of the measurement."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def __contains__(self, moment: float | None) -> bool:
        return moment is not None and self.start <= moment < self.end


def steady_window(records: Sequence[RequestRecord]) -> Window | None:
    """From the end of the build-up to the last request that was sent; None when the run never settled.

    Where the build-up ends is found by the rule MSER (White, An Effective Truncation Heuristic for Bias Reduction in
    Simulation Output, 1997): what is cut off leaves the mean number of requests in flight with the smallest error. A
    run that would lose half to it, has not settled.
    """
    sent = [r.sent for r in records if r.sent is not None]
    if not sent or max(sent) - min(sent) < SHORTEST:
        return None
    edges = np.linspace(min(sent), max(sent), BINS + 1)
    flying = in_flight(records, edges)
    errors = [
        ((tail := flying[cut:]) - tail.mean()).var() / len(tail) for cut in range(BINS // 2 + 1)
    ]
    cut = int(np.argmin(errors))
    window = Window(float(edges[cut]), float(edges[-1]))
    return window if cut < BINS // 2 and window.seconds >= SHORTEST else None


def in_flight(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """Mean numbers of requests in flight between one edge and the next, `[len(edges) - 1]`."""

    def passed(moments: list[float]) -> Floats:
        """The sum, at each edge, of the seconds since those moments."""
        ordered = np.sort(np.array(moments))
        sums = np.concatenate(([0.0], np.cumsum(ordered)))
        before = np.searchsorted(ordered, edges)
        return edges * before - sums[before]

    begun = passed([r.sent for r in records if r.sent is not None])
    ended = passed([r.ended for r in records if r.sent is not None and r.ended is not None])
    return np.diff(begun - ended) / np.diff(edges)


def tokens_between(records: Sequence[RequestRecord], edges: Floats) -> Floats:
    """Tokens that came between one edge and the next, `[len(edges) - 1]`; those of requests that failed are no use."""
    pairs = [record.token_times() for record in records if record.error is None]
    if not pairs:
        return np.zeros(len(edges) - 1)
    times = np.concatenate([pair[0] for pair in pairs])
    return np.histogram(times, edges, weights=np.concatenate([pair[1] for pair in pairs]))[0]


def rate(amounts: Floats, seconds: float) -> Estimate:
    """What came in each of ten equal parts of a time, per second, by the method of batch means."""
    each = amounts * BATCHES / seconds
    mean, spread = float(each.mean()), STUDENT_95 * float(each.std(ddof=1)) / BATCHES**0.5
    return Estimate(mean, mean - spread, mean + spread)


def batch_edges(window: Window) -> Floats:
    """The window in ten equal parts."""
    return np.linspace(window.start, window.end, BATCHES + 1)
