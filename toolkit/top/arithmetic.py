"""Rates of counters and quantiles of histograms, between two readings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from toolkit.top.scrape import Scrape


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution in seconds; the values are None when nothing was observed."""

    p50: float | None
    p90: float | None
    p99: float | None
    mean: float | None
    count: float


def increase(name: str, old: Scrape | None, new: Scrape) -> float | None:
    """How much a counter rose; since the server's start when `old` is None. None: no such counter."""
    now = new.total(name)
    if now is None:
        return None
    before = old.total(name) if old is not None else None
    return max(0.0, now - (before or 0.0))


def rate(name: str, old: Scrape, new: Scrape) -> float | None:
    """Increase per second."""
    gained = increase(name, old, new)
    seconds = new.time - old.time
    return None if gained is None or seconds <= 0 else gained / seconds


def share(part: str, whole: str, old: Scrape | None, new: Scrape) -> float | None:
    """Increase of one counter over that of another; None when the other did not rise."""
    gained, of = increase(part, old, new), increase(whole, old, new)
    return None if gained is None or not of else gained / of


def latency(name: str, old: Scrape | None, new: Scrape) -> Latency:
    """What a histogram observed between two readings; since the server's start when `old` is None."""
    before = old.buckets(name) if old is not None else {}
    buckets = {bound: count - before.get(bound, 0.0) for bound, count in new.buckets(name).items()}
    count = increase(f"{name}_count", old, new) or 0.0
    total = increase(f"{name}_sum", old, new) or 0.0
    return Latency(
        p50=quantile(buckets, 0.50),
        p90=quantile(buckets, 0.90),
        p99=quantile(buckets, 0.99),
        mean=total / count if count else None,
        count=count,
    )


def quantile(buckets: Mapping[float, float], q: float) -> float | None:
    """The q-quantile of cumulative counts by ascending upper bound, as Prometheus's `histogram_quantile`.

    Linear within a bucket; the first begins at 0. What lies above the last finite bound is that bound.
    None when nothing was observed.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    wanted = q * total
    lower, below = 0.0, 0.0
    for bound, count in buckets.items():
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return lower


def restarted(old: Scrape, new: Scrape) -> bool:
    """Whether the server began anew in between, so that its counters cannot be subtracted."""
    if old.start_time is not None and new.start_time is not None and old.start_time != new.start_time:
        return True
    counters = ("generation_tokens_total", "prompt_tokens_total", "e2e_request_latency_seconds_count")
    return any((new.total(name) or 0.0) < (old.total(name) or 0.0) for name in counters)
