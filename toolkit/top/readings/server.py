"""What is kept of one server: the readings of the window, and points for the charts."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

from toolkit.top.drawing.bands import spread
from toolkit.top.readings.arithmetic import (
    increase,
    observed,
    quantiles,
    requests_per_step,
    restarted,
)
from toolkit.top.readings.reading import LiveRequest, Reading

HISTORY = 300  # points of a chart: wider than most terminals
KEPT = 120  # readings that span the window

LATENCIES = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "TPOT": "request_time_per_output_token_seconds",
    "E2E": "e2e_request_latency_seconds",
    "queue": "request_queue_time_seconds",
    "prefill": "request_prefill_time_seconds",
}
RATES = {
    "generation": "generation_tokens_total",
    "prompt": "prompt_tokens_total",
    "finished": "request_success_total",
    "preempted": "num_preemptions_total",
}
GAUGES = {
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "kv": "kv_cache_usage_perc",
    "gpu": "gpu_utilization_perc",
    "power": "gpu_power_watts",
}

Point = float | None


class Server:
    """One server over the last `window` seconds. Its memory does not grow."""

    def __init__(self, url: str, window: float) -> None:
        self.url = url
        self.name = url.partition("://")[2]
        self.window = window
        self.error = ""
        self.tried: float | None = None
        """When the newest reading, good or not, was taken."""
        self.last: Reading | None = None
        """The newest good one."""
        self.settings: dict[str, Any] | None = None
        self.requests: list[LiveRequest] | None = None
        self.no_requests = ""
        self.times: deque[float] = deque(maxlen=HISTORY)
        """When each of the points was taken."""
        self.points: dict[str, deque[Point]] = {
            name: deque(maxlen=HISTORY) for name in (*RATES, *GAUGES, "batch", *LATENCIES)
        }
        self.bands: dict[str, deque[array[float]]] = {
            name: deque(maxlen=HISTORY) for name in LATENCIES
        }
        self._kept: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        """Takes the newest reading. After a restart of the server those before it count no more."""
        self.tried, self.error = reading.time, reading.error
        if reading.error:
            self._add_gap(reading.time)
            return
        if reading.settings is not None:
            self.settings = reading.settings
        if reading.requests is not None or reading.no_requests:
            self.requests, self.no_requests = reading.requests, reading.no_requests
        before = self.last
        if before is not None and restarted(before, reading):
            self._kept.clear()
            self._add_gap(reading.time)
            before = None
        self.last = reading
        if before is not None:
            self._add_points(before, reading)
        if not self._kept or reading.time - self._kept[-1].time >= 0.99 * self.window / KEPT:
            self._kept.append(reading)
        while len(self._kept) > 1 and self._kept[1].time <= reading.time - self.window:
            self._kept.popleft()  # the one before the window stays while it is needed to span the window

    @property
    def first(self) -> Reading | None:
        """The reading at the window's begin."""
        return self._kept[0] if self._kept else None

    @property
    def is_up(self) -> bool:
        """Whether the newest attempt to read it went well."""
        return self.last is not None and not self.error

    @property
    def is_tk(self) -> bool:
        """Whether it is a tk server, whatever prefix its metrics have."""
        return self.last is not None and "scheduling_policy" in self.last.labels

    def age(self, now: float) -> float:
        """Seconds since the numbers were true; infinite when there never were any."""
        return now - self.last.time if self.last is not None else float("inf")

    def _add_points(self, old: Reading, new: Reading) -> None:
        seconds = new.time - old.time
        if seconds <= 0:
            return
        self.times.append(new.time)
        for title, name in RATES.items():
            gained = increase(name, old, new)
            self.points[title].append(None if gained is None else gained / seconds)
        for title, name in GAUGES.items():
            self.points[title].append(new.numbers.get(name))
        told, steps = (
            observed(name, old, new)
            for name in ("iteration_num_requests", "iteration_tokens_total")
        )
        generated = increase("generation_tokens_total", old, new)
        self.points["batch"].append(requests_per_step(told, steps, generated))
        for title, name in LATENCIES.items():
            histogram = observed(name, old, new)
            self.points[title].append(quantiles(histogram.pieces, (0.5,))[0])
            self.bands[title].append(spread(histogram.pieces))

    def _add_gap(self, time: float) -> None:
        """Nothing is known of this moment."""
        if self.last is None:
            return
        self.times.append(time)
        for points in self.points.values():
            points.append(None)
        for bands in self.bands.values():
            bands.append(spread(()))
