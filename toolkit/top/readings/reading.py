"""One reading of a server: shared by the dashboard, recordings and the demo."""

from typing import Any

import msgspec


class Histogram(msgspec.Struct, array_like=True, frozen=True):
    """Observations by bucket.

    `buckets` are (above, up to, count), ascending, without the empty ones. Values above the last
    bound count as equal to it, as in Prometheus' `histogram_quantile`."""

    count: float = 0.0
    sum: float = 0.0
    buckets: list[tuple[float, float, float]] = []


class LiveRequest(msgspec.Struct):
    """A live request as /tk/requests lists it. Times in seconds."""

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
    adapter: str = ""


class Reading(msgspec.Struct, omit_defaults=True):
    """One server at one moment. Metric names have no prefix.

    If the server could not be read, `error` says why and the rest is empty. `requests` is None if
    they were not asked for, or if the server does not list them; then `no_requests` says why.
    `settings` come with the first reading of a connection."""

    url: str
    time: float  # seconds on a monotonic clock
    wall: float  # seconds since 1970
    error: str = ""
    numbers: dict[str, float] = {}  # sums over engines and models; means where a sum makes no sense
    parts: dict[str, dict[str, float]] = {}
    """Numbers by the value of a label: finished by reason, errors by code, power by GPU."""
    histograms: dict[str, Histogram] = {}
    labels: dict[str, str] = {}  # labels of info metrics: versions and settings
    model: str = ""
    version: str = ""
    requests: list[LiveRequest] | None = None
    no_requests: str = ""
    settings: dict[str, Any] | None = None

    @property
    def start_time(self) -> float | None:
        """Start of the server's process, or of its counters, in seconds since 1970."""
        created = self.numbers.get("generation_tokens_created")
        return self.numbers.get("process_start_time_seconds", created)
