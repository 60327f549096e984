"""State of one server: the readings of the window, and points for the charts."""

from __future__ import annotations

from array import array
from collections import deque
from typing import Any

from toolkit.top.drawing.bands import count_by_band
from toolkit.top.readings.arithmetic import (
    counter_increase,
    has_restarted,
    histogram_increase,
    quantiles,
    requests_per_step,
)
from toolkit.top.readings.reading import LiveRequest, Reading

HISTORY = 300  # points of a chart: wider than most terminals
MAX_READINGS = 120  # that span the window

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
        self.last_attempt: float | None = None  # time of the newest reading, also of a failed one
        self.last: Reading | None = None  # newest successful reading
        self.settings: dict[str, Any] | None = None
        self.requests: list[LiveRequest] | None = None
        self.no_requests = ""
        self.times: deque[float] = deque(maxlen=HISTORY)  # of the points
        self.points: dict[str, deque[Point]] = {
            name: deque(maxlen=HISTORY) for name in (*RATES, *GAUGES, "batch", *LATENCIES)
        }
        self.bands: dict[str, deque[array[float]]] = {
            name: deque(maxlen=HISTORY) for name in LATENCIES
        }
        self._readings: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        """Add the newest reading. A restart of the server drops the readings before it."""
        self.last_attempt, self.error = reading.time, reading.error
        if reading.error:
            self._add_gap(reading.time)
            return
        if reading.settings is not None:
            self.settings = reading.settings
        if reading.requests is not None or reading.no_requests:
            self.requests, self.no_requests = reading.requests, reading.no_requests
        before = self.last
        if before is not None and has_restarted(before, reading):
            self._readings.clear()
            self._add_gap(reading.time)
            before = None
        self.last = reading
        if before is not None:
            self._add_points(before, reading)
        least_gap = 0.99 * self.window / MAX_READINGS
        if not self._readings or reading.time - self._readings[-1].time >= least_gap:
            self._readings.append(reading)
        # The last reading before the window stays while it is needed to span the window.
        while len(self._readings) > 1 and self._readings[1].time <= reading.time - self.window:
            self._readings.popleft()

    @property
    def first(self) -> Reading | None:
        """Reading at the start of the window."""
        return self._readings[0] if self._readings else None

    @property
    def is_up(self) -> bool:
        """True if the newest attempt to read it succeeded."""
        return self.last is not None and not self.error

    @property
    def is_tk(self) -> bool:
        """True for a tk server, whatever the prefix of its metrics."""
        return self.last is not None and "scheduling_policy" in self.last.labels

    def age(self, now: float) -> float:
        """Return the seconds since the last successful reading; infinite without one."""
        return now - self.last.time if self.last is not None else float("inf")

    def _add_points(self, old: Reading, new: Reading) -> None:
        seconds = new.time - old.time
        if seconds <= 0:
            return
        self.times.append(new.time)
        for title, name in RATES.items():
            gained = counter_increase(name, old, new)
            self.points[title].append(None if gained is None else gained / seconds)
        for title, name in GAUGES.items():
            self.points[title].append(new.numbers.get(name))
        batch_sizes, steps = (
            histogram_increase(name, old, new)
            for name in ("iteration_num_requests", "iteration_tokens_total")
        )
        generated = counter_increase("generation_tokens_total", old, new)
        self.points["batch"].append(requests_per_step(batch_sizes, steps, generated))
        for title, name in LATENCIES.items():
            histogram = histogram_increase(name, old, new)
            self.points[title].append(quantiles(histogram.buckets, (0.5,))[0])
            self.bands[title].append(count_by_band(histogram.buckets))

    def _add_gap(self, time: float) -> None:
        """Add points without a value."""
        if self.last is None:
            return
        self.times.append(time)
        for points in self.points.values():
            points.append(None)
        for bands in self.bands.values():
            bands.append(count_by_band(()))
