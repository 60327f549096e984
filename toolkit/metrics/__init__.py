"""All Prometheus metrics. After the prefix, names and meanings are vLLM's."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from toolkit.logs import num_dropped_lines

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")


def _steps(first: float, last: float, factor: float = 1.25) -> tuple[float, ...]:
    """Return bucket bounds from `first` to at least `last`, `factor` apart, with three digits."""
    bounds = [first]
    while bounds[-1] < last:
        bounds.append(float(f"{bounds[-1] * factor:.3g}"))
    return tuple(bounds)


SHORT_SECONDS = _steps(0.0005, 10.0)
LONG_SECONDS = _steps(0.0005, 600.0)
TOKENS = tuple(float(2**i) for i in range(18))
SMALL_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class CountedSeries:
    """One series of a CountedHistogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)  # values between each bound and the one before
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class CountedHistogram(Collector):
    """Histogram whose `observe` counts a value several times: one call for a step's tokens."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        *,
        buckets: tuple[float, ...],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._text, self._labels = name, text, list(labels)
        self._bounds = (*buckets, float("inf"))
        self._series: dict[tuple[str, ...], CountedSeries] = {}
        registry.register(self)

    def labels(self, *values: str) -> CountedSeries:
        """Return the series with these label values."""
        return self._series.setdefault(values, CountedSeries(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Yield cumulative bucket counts, as Prometheus expects."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [str(bound) for bound in self._bounds[:-1]] + ["+Inf"]
        for values, series in self._series.items():
            counts = accumulate(series.counts)
            family.add_metric(
                values,
                [(b, float(count)) for b, count in zip(bounds, counts, strict=True)],
                series.sum,
            )
        return [family]


class DroppedLines(Collector):
    """Log lines that this process has dropped."""

    def __init__(self, prefix: str) -> None:
        self._name = f"{prefix}:log_lines_dropped"

    def collect(self) -> Iterable[CounterMetricFamily]:
        text = "Log lines dropped by the HTTP processes because stderr did not take them."
        return [CounterMetricFamily(self._name, text, num_dropped_lines())]


class Throughput:
    """Rates of one engine."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts = [0, 0, 0]

    def add(self, num_computed: int, num_generated: int) -> None:
        """Count one step and its tokens."""
        counts = self._counts
        counts[0] += 1
        counts[1] += num_computed
        counts[2] += num_generated

    def take(self, now: float) -> tuple[float, float, float]:
        """Return (steps, tokens computed, tokens generated) per second since the last call.

        `now`: time.monotonic()."""
        steps, computed, generated = (count / (now - self._since) for count in self._counts)
        self._since, self._counts = now, [0, 0, 0]
        return steps, computed, generated


class Metrics:
    """The metrics of one engine of a model. All of a server are in one registry.

    Times in seconds, lengths in tokens."""

    def __init__(
        self, prefix: str, model_name: str, engine: str = "0", shared: Metrics | None = None
    ) -> None:
        """`shared`: metrics of another engine or model of this server, to use its registry."""
        self.registry: CollectorRegistry = (
            CollectorRegistry() if shared is None else shared.registry
        )
        self._families: dict[str, Any] = {} if shared is None else shared._families
        self._prefix = prefix
        self._values = (model_name, engine)
        self.throughput = Throughput()
        self._all: dict[tuple[str, str], Metrics] = {} if shared is None else shared._all
        """Those of all engines of the server, by labels."""
        self._all[self._values] = self
        if shared is None:
            self.registry.register(DroppedLines(prefix))

        self.num_requests_running = self._gauge(
            "num_requests_running", "Requests in the running batch."
        )
        self.num_requests_waiting = self._gauge("num_requests_waiting", "Requests in the queue.")
        self._num_waiting_by_reason = self._family(
            Gauge,
            "num_requests_waiting_by_reason",
            "Requests in the queue, by what they wait for.",
            "reason",
        ).labels(*self._values, "capacity")
        self.kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use, from 0 to 1."
        )

        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests that have their first token."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._prompt_tokens_by_source = self._family(
            Counter,
            "prompt_tokens_by_source",
            "Prompt tokens, by the source of their keys and values.",
            "source",
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache."
        )
        self.mm_cache_queries = self._counter(
            "mm_cache_queries", "Pictures and clips that requests needed."
        )
        self.mm_cache_hits = self._counter(
            "mm_cache_hits", "Pictures and clips that another request had computed."
        )
        self.audio_seconds = self._counter("audio_seconds", "Seconds of sound transcribed.")
        self.num_preemptions = self._counter("num_preemptions", "Preemptions of running requests.")
        self.late_compilations = self._counter(
            "late_compilations", "GPU kernels compiled after start-up, for which a step waited."
        )
        self.spec_decode_num_drafts = self._counter(
            "spec_decode_num_drafts", "Times that drafts of a request were verified."
        )
        self.spec_decode_num_draft_tokens = self._counter(
            "spec_decode_num_draft_tokens", "Draft tokens verified."
        )
        self.spec_decode_num_accepted_tokens = self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted."
        )
        self._accepted_per_position = self._family(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place among the drafts.",
            "position",
        )
        self._request_success = self._family(
            Counter,
            "request_success",
            "Finished requests, by the reason of their last answer.",
            "finished_reason",
        )
        for reason in ("stop", "length", "abort", "error"):  # 0 first: a rate needs two values
            self._request_success.labels(*self._values, reason)

        self._admission_rejections = self._family(
            Counter,
            "admission_rejections",
            "Requests rejected for a full queue or for their key's share or rate limit.",
            "reason",
        )

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "Time from arrival to the first token.", LONG_SECONDS
        )
        self.inter_token_latency: CountedSeries = self._family(
            CountedHistogram,
            "inter_token_latency_seconds",
            "Time between two tokens of a request.",
            buckets=SHORT_SECONDS,
        ).labels(*self._values)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request, after the first token.",
            SHORT_SECONDS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", LONG_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "Time in the queue.", LONG_SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "Time from running to the first token.", LONG_SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "Time from the first token to the end.", LONG_SECONDS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "Time from running to the end.", LONG_SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Generated tokens of a request.", TOKENS
        )
        self.request_params_n = self._histogram(
            "request_params_n", "Parameter n of a request.", SMALL_COUNTS
        )
        self.request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "Parameter max_tokens of a request.", TOKENS
        )
        self.request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens",
            "Tokens of the longest answer of a request.",
            TOKENS,
        )
        self.request_num_preemptions = self._histogram(
            "request_num_preemptions", "Preemptions of a sequence.", SMALL_COUNTS
        )
        self.request_prefill_kv_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that were not in the prefix cache.",
            TOKENS,
        )
        self.batch_size = self._histogram("iteration_num_requests", "Requests in a step.", TOKENS)
        self.iterations_per_second = self._gauge(
            "iterations_per_second", "Steps per second, over the last ten seconds."
        )
        self.computed_tokens_per_second = self._gauge(
            "computed_tokens_per_second",
            "Prompt and answer tokens computed per second, over the last ten seconds.",
        )
        self.generation_tokens_per_second = self._gauge(
            "generation_tokens_per_second",
            "Tokens generated per second, over the last ten seconds.",
        )
        self._work = [
            self._counter(
                f"estimated_{kind}_per_gpu",
                f"{text}: lower bound from the sizes of weights and KV cache.",
            )
            for kind, text in (
                ("flops", "Floating-point operations of the steps"),
                ("read_bytes", "Bytes that the steps read"),
                ("write_bytes", "Bytes that the steps write"),
            )
        ]
        self._block_times = [
            self._histogram(f"kv_block_{kind}_seconds", text, LONG_SECONDS)
            for kind, text in (
                ("lifetime", "Time from a block's allocation to its eviction (sampled)."),
                (
                    "idle_before_evict",
                    "Time from a cached block's last use to its eviction (sampled).",
                ),
                ("reuse_gap", "Time between two uses of a cached block (sampled)."),
            )
        ]
        self._lora_requests = [
            self._family(Gauge, f"lora_requests_{state}", text, "lora_name")
            for state, text in (
                ("running", "Requests that run, for each LoRA adapter in memory."),
                ("waiting", "Requests that wait, for each LoRA adapter in memory."),
            )
        ]
        self._lora_info = self._family(
            Gauge,
            "lora_requests_info",
            "LoRA adapters of requests, as labels. The value is the time of the last change.",
            "max_lora",
            "running_lora_adapters",
            "waiting_lora_adapters",
        )
        self._adapters: dict[str, tuple[int, int]] = {}
        self.max_loras: int = 0 if shared is None else shared.max_loras
        self._lora_labels: tuple[str, ...] | None = None
        self._errors = self._family(
            Counter, "errors", "Error responses, by HTTP status.", labels=("code",)
        )
        self._engine_restarts = self._counter("engine_restarts", "Restarts of an engine that died.")
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", TOKENS
        )

    def for_engine(self, engine: int) -> Metrics:
        """Return the metrics of another engine of the model."""
        return self._other(self._values[0], str(engine))

    def for_model(self, name: str) -> Metrics:
        """Return the metrics of another model of the server."""
        return self._other(name, "0")

    def _other(self, model_name: str, engine: str) -> Metrics:
        known = self._all.get((model_name, engine))
        return known or Metrics(self._prefix, model_name, engine, self)

    def observe_throughput(self) -> tuple[float, float, float]:
        """Set each engine's gauges.

        Returns (steps, tokens computed, tokens generated) per second, summed over engines."""
        now, total = time.monotonic(), (0.0, 0.0, 0.0)
        for one in self._all.values():
            steps, computed, generated = one.throughput.take(now)
            one.iterations_per_second.set(steps)
            one.computed_tokens_per_second.set(computed)
            one.generation_tokens_per_second.set(generated)
            total = (total[0] + steps, total[1] + computed, total[2] + generated)
        return total

    def count_finished(self, reason: str) -> None:
        """Count the end of a request."""
        self._request_success.labels(*self._values, reason).inc()

    def observe_waiting(self, count: int) -> None:
        """Set the length of the queue."""
        self.num_requests_waiting.set(count)
        self._num_waiting_by_reason.set(count)

    def observe_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt once it has its first token."""
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_cached.inc(num_cached)
        by_source = self._prompt_tokens_by_source
        by_source.labels(*self._values, "local_cache_hit").inc(num_cached)
        by_source.labels(*self._values, "local_compute").inc(num_tokens - num_cached)
        self.request_prefill_kv_computed_tokens.observe(num_tokens - num_cached)

    def observe_accepted(self, counts: Sequence[int]) -> None:
        """Count accepted drafts, by their place after a request's newest token."""
        for position, count in enumerate(counts):
            self._accepted_per_position.labels(*self._values, str(position)).inc(count)

    def observe_adapters(self, adapters: dict[str, tuple[int, int]]) -> None:
        """Set the requests that run and wait, by adapter. Called when they change."""
        for i, gauge in enumerate(self._lora_requests):
            for name in self._adapters.keys() - adapters.keys():
                gauge.remove(*self._values, name)
            for name, counts in adapters.items():
                gauge.labels(*self._values, name).set(counts[i])
        if self._lora_labels is not None:
            self._lora_info.remove(*self._lora_labels)
        self._adapters = adapters
        self._lora_labels = (
            *self._values,
            str(self.max_loras),
            *(",".join(name for name in adapters if adapters[name][i]) for i in (0, 1)),
        )
        self._lora_info.labels(*self._lora_labels).set(time.time())

    def observe_work(self, work: Iterable[float]) -> None:
        """Count a step's operations, bytes read and bytes written."""
        for counter, amount in zip(self._work, work, strict=True):
            counter.inc(amount)

    def observe_blocks(self, times: Iterable[Iterable[float]]) -> None:
        """Observe lifetimes, idle times before eviction and reuse gaps of blocks."""
        for histogram, seconds in zip(self._block_times, times, strict=True):
            for one in seconds:
                histogram.observe(one)

    def count_error(self, status: int) -> None:
        """Count an error response."""
        self._errors.labels(str(status)).inc()

    def count_restart(self) -> None:
        """Count the restart of an engine core that died."""
        self._engine_restarts.inc()

    def describe(self, name: str, text: str, labels: dict[str, str]) -> None:
        """Add an info metric: a gauge that is always 1 and has these labels."""
        gauge = self._family(Gauge, name, text, *labels)
        gauge.labels(*self._values, *labels.values()).set(1)

    def observe_machine(self, *, gpu: bool) -> None:
        """Report the server's processes and, if `gpu` is set, the GPUs."""
        from toolkit.metrics.machine import GPUMetrics, ProcessMetrics

        self.registry.register(ProcessMetrics(self._prefix))
        if gpu:
            self.registry.register(GPUMetrics(self._prefix))

    def count_rejection(self, reason: str) -> None:
        """Count a request that was not admitted."""
        self._admission_rejections.labels(*self._values, reason).inc()

    def expose(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        gauge: Gauge = self._family(Gauge, name, text).labels(*self._values)
        return gauge

    def _counter(self, name: str, text: str) -> Counter:
        counter: Counter = self._family(Counter, name, text).labels(*self._values)
        return counter

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram: Histogram = self._family(Histogram, name, text, buckets=buckets).labels(
            *self._values
        )
        return histogram

    def _family(
        self,
        kind: Callable[..., Any],
        name: str,
        text: str,
        *extra_labels: str,
        labels: tuple[str, ...] = LABELS,
        **options: Any,
    ) -> Any:
        """Return the metric of this name, which all engines share; create it on first use."""
        if name not in self._families:
            full = f"{self._prefix}:{name}"
            self._families[name] = kind(
                full, text, (*labels, *extra_labels), registry=self.registry, **options
            )
        return self._families[name]


class HTTPMetrics:
    """Counts and durations of all HTTP requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "status", "handler")
        self._requests = Counter(
            "http_requests", "HTTP requests by method, status and route.", labels, registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "Time from a request's headers to the end of the response.",
            ("method", "handler"),
            buckets=LONG_SECONDS,
            registry=registry,
        )
        tasks = Gauge(
            "http_server_tasks",
            "Tasks of the event loops: a few per open request.",
            registry=registry,
        )
        tasks.set_function(_num_tasks)

    def observe(self, route: object, method: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the one that matched, or None.

        The label is the route: raw paths would make a series for every mistyped URL."""
        handler = str(getattr(route, "path", "none"))
        family = f"{status // 100}xx" if status else "none"
        self._requests.labels(method, family, handler).inc()
        self._duration.labels(method, handler).observe(seconds)


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0  # no running event loop
