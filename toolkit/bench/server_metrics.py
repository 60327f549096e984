"""What the server counted itself while it was loaded, where it has /metrics with the names of vLLM (after any prefix)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.bench.load.http_client import Http
from toolkit.client.wire import RequestFailedError

GAUGES = ("num_requests_running", "num_requests_waiting")
COUNTERS = (
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "request_queue_time_seconds_sum",
    "request_queue_time_seconds_count",
)
OTHERS_LOAD = 1.05
"""Tokens that a server made, over those that came here: beyond it, others have used it too."""

Snapshot = Mapping[str, float]
"""Values by name without prefix, each the sum over its labels."""


def parse(text: str) -> Snapshot:
    """The metrics that matter here, of Prometheus' text format."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2]
            if name in GAUGES or name in COUNTERS:
                found[name] = found.get(name, 0.0) + sample.value
    return found


async def read_metrics(http: Http) -> Snapshot | None:
    """None when the server shows none that are known."""
    try:
        status, body = await http.get("/metrics", timeout=5.0)
        return (parse(body.decode()) or None) if status == 200 else None
    except (RequestFailedError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class ServerChange:
    """What a server counted between two looks at it."""

    before: Snapshot
    after: Snapshot

    def counted(self, name: str) -> float | None:
        """How much a counter grew; None when it is not there, or began anew with another process."""
        name = f"{name}_total"
        if (
            name not in self.before
            or name not in self.after
            or self.after[name] < self.before[name]
        ):
            return None
        return self.after[name] - self.before[name]

    @property
    def prefix_hit_ratio(self) -> float | None:
        """Share of the prompts' tokens that were in the cache."""
        hits, queries = self.counted("prefix_cache_hits"), self.counted("prefix_cache_queries")
        return None if hits is None or not queries else hits / queries

    @property
    def queue_s(self) -> float | None:
        """Mean seconds that a request waited in the server's queue."""
        name = "request_queue_time_seconds"
        total, count = (
            self.after.get(f"{name}_{part}", 0.0) - self.before.get(f"{name}_{part}", 0.0)
            for part in ("sum", "count")
        )
        return total / count if count > 0 and total >= 0 else None

    @property
    def was_busy(self) -> bool:
        """Whether it had requests before the first of these."""
        return any(self.before.get(name, 0.0) > 0 for name in GAUGES)

    def served_others(self, output_tokens: int) -> bool:
        """Whether it made more tokens than came here: then others were measured, too."""
        made = self.counted("generation_tokens")
        return made is not None and made > OTHERS_LOAD * output_tokens

    def as_json(self) -> dict[str, Any]:
        return {
            "before": dict(self.before),
            "after": dict(self.after),
            "prefix_hit_ratio": self.prefix_hit_ratio,
            "preemptions": self.counted("num_preemptions"),
            "queue_s": self.queue_s,
        }
