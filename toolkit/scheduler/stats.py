"""Figures that an engine reports after each step."""

from typing import Annotated, get_type_hints

import msgspec

Counter = Annotated[int, "counter"]
"""Events since the last report. The metric of the same name is incremented by it."""
Mean = Annotated[float, "mean"]  # A gauge whose value for several engines is the mean, not the sum


class EngineStats(msgspec.Struct, array_like=True):
    """Gauges, and counts since the last report.

    A new counter is one `Counter` field here, the metric of the same name in `toolkit.metrics`, and
    the place that counts."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: Mean = 0.0  # share of the blocks in use, 0 to 1
    prefix_cache_queries: Counter = 0  # tokens looked up in the prefix cache
    prefix_cache_hits: Counter = 0  # tokens found there
    mm_cache_queries: Counter = 0  # pictures that requests needed
    mm_cache_hits: Counter = 0  # of these, encoded for another request
    num_preemptions: Counter = 0
    late_compilations: Counter = 0  # kernels compiled after start-up
    spec_decode_num_drafts: Counter = 0  # times that drafts of a request were verified
    spec_decode_num_draft_tokens: Counter = 0
    spec_decode_num_accepted_tokens: Counter = 0
    num_tokens: int = 0  # tokens that the step computed
    num_sampled: int = 0  # tokens that the step sampled
    work: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Least work of the step: operations, bytes read, bytes written, of weights and KV cache."""
    block_times: list[list[float]] = []  # seconds, as `BlockWatch.take` returns them
    accepted_per_position: list[int] = []  # accepted drafts, by their place after the newest token
    adapters: dict[str, tuple[int, int]] | None = None
    """Requests that run and that wait, for each LoRA adapter in memory. None: as before."""


class StatsRecorder:
    """Counts since the last report, which several parts of the scheduler add to."""

    def __init__(self) -> None:
        self.current = EngineStats()

    def take(self) -> EngineStats:
        """Return the counts since the last call."""
        taken, self.current = self.current, EngineStats()
        return taken


_HINTS = get_type_hints(EngineStats, include_extras=True)
COUNTERS = tuple(name for name, hint in _HINTS.items() if hint is Counter)


def total(several: list[EngineStats]) -> EngineStats:
    """Return the numbers of several engines together: sums, and means of shares.

    `work` and `block_times`, which belong to one step, are left out."""
    if len(several) == 1:
        return several[0]
    together = EngineStats()
    for name, hint in _HINTS.items():
        if hint is Mean or hint in (int, Counter):
            value = sum(getattr(stats, name) for stats in several)
            setattr(together, name, value / max(1, len(several)) if hint is Mean else value)
    return together
