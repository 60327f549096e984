"""What one look at a server brings: the record that the dashboard, recordings and the demo share."""

from __future__ import annotations

from typing import Any

import msgspec


class Histogram(msgspec.Struct, array_like=True, frozen=True):
    """Observations between bounds.

    `pieces` are (above, up to, how many), ascending, without the empty ones; what lies above the last bound stands
    at that bound, as in Prometheus' `histogram_quantile`.
    """

    count: float = 0.0
    sum: float = 0.0
    pieces: list[tuple[float, float, float]] = []


class LiveRequest(msgspec.Struct):
    """A request that a tk server has now, as /tk/requests tells. Times in seconds."""

    id: str
    state: str = ""
    age: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    tokens_per_second: float = 0.0
    num_blocks: int = 0
    num_preemptions: int = 0
    priority: int = 0
    origin: str = ""
    n: int = 1


class Reading(msgspec.Struct, omit_defaults=True):
    """One server at one moment. Names of metrics are without the server's prefix.

    When nothing could be read, `error` says why and the rest is empty. `requests` is None when nobody asked for them or
    the server does not tell; then `no_requests` says why. `settings` come with the first reading of a connection.
    """

    url: str
    time: float
    """Seconds on a clock that only goes on."""
    wall: float
    """Seconds since 1970."""
    error: str = ""
    numbers: dict[str, float] = {}
    """Sums over engines and models; means where a sum means nothing."""
    parts: dict[str, dict[str, float]] = {}
    """Numbers by the value of a label: ends by reason, errors by code, power by GPU."""
    histograms: dict[str, Histogram] = {}
    labels: dict[str, str] = {}
    """Of the metrics that exist for their labels: versions, settings."""
    model: str = ""
    version: str = ""
    requests: list[LiveRequest] | None = None
    no_requests: str = ""
    settings: dict[str, Any] | None = None

    @property
    def start_time(self) -> float | None:
        """When the server's process started, or its counters did, in seconds since 1970."""
        created = self.numbers.get("generation_tokens_created")
        return self.numbers.get("process_start_time_seconds", created)
