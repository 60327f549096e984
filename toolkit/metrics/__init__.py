"""Every Prometheus metric, defined once. Names and meanings are vLLM's after the prefix."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")


def _steps(first: float, last: float, factor: float = 1.25) -> tuple[float, ...]:
    """Bucket bounds from `first` to at least `last`, each `factor` above the one before, to three digits."""
    bounds = [first]
    while bounds[-1] < last:
        bounds.append(float(f"{bounds[-1] * factor:.3g}"))
    return tuple(bounds)


SHORT_SECONDS = _steps(0.0005, 10.0)
LONG_SECONDS = _steps(0.0005, 600.0)
TOKENS = tuple(float(2**i) for i in range(18))
SMALL_COUNTS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Counted:
    """One series of a CountedHistogram."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self.counts = [0] * len(bounds)
        """Of the values between each bound and the one before."""
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count


class CountedHistogram(Collector):
    """A histogram that takes in many equal values at once: those of one step's tokens."""

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
        self._series: dict[tuple[str, ...], Counted] = {}
        registry.register(self)

    def labels(self, *values: str) -> Counted:
        """The series with these labels."""
        return self._series.setdefault(values, Counted(self._bounds))

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """What Prometheus reads: counts of the values up to each bound."""
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


class Throughput:
    """How much the engine does in a second."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._counts = [0, 0, 0]

    def add(self, num_computed: int, num_generated: int) -> None:
        """Counts a step and its tokens."""
        counts = self._counts
        counts[0] += 1
        counts[1] += num_computed
        counts[2] += num_generated

    def take(self, now: float) -> tuple[float, float, float]:
        """(steps, tokens computed, tokens generated) in a second, from when this was last asked until `now`, on the monotonic clock."""
        steps, computed, generated = (count / (now - self._since) for count in self._counts)
        self._since, self._counts = now, [0, 0, 0]
        return steps, computed, generated


class Metrics:
    """The metrics of one served model. Times in seconds, lengths in tokens."""

    def __init__(
        self, prefix: str, model_name: str, engine: str = "0", beside: Metrics | None = None
    ) -> None:
        """`beside`: those of another engine, with which these are told."""
        self.registry: CollectorRegistry = (
            CollectorRegistry() if beside is None else beside.registry
        )
        self._families: dict[str, Any] = {} if beside is None else beside._families
        self._prefix = prefix
        self._values = (model_name, engine)
        self.throughput = Throughput()
        self.engines: dict[str, Metrics] = {} if beside is None else beside.engines
        """All of the server's, by their label."""
        self.engines[engine] = self

        self.num_requests_running = self._gauge(
            "num_requests_running", "Requests that are being computed."
        )
        self.num_requests_waiting = self._gauge(
            "num_requests_waiting", "Requests that wait to run."
        )
        self._num_waiting_by_reason = self._family(
            Gauge,
            "num_requests_waiting_by_reason",
            "Requests that wait to run, by what for.",
            "reason",
        ).labels(*self._values, "capacity")
        self.kv_cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1."
        )

        self.prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of requests whose first token has come."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Prompt tokens found in the prefix cache."
        )
        self._prompt_tokens_by_source = self._family(
            Counter,
            "prompt_tokens_by_source",
            "Prompt tokens, by where their keys and values came from.",
            "source",
        )
        self.prefix_cache_queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self.prefix_cache_hits = self._counter(
            "prefix_cache_hits", "Tokens found in the prefix cache."
        )
        self.num_preemptions = self._counter(
            "num_preemptions", "Times that a running request had to make room."
        )
        self._request_success = self._family(
            Counter, "request_success", "Requests that ended, by reason.", "finished_reason"
        )

        self._admission_rejections = self._family(
            Counter,
            "admission_rejections",
            "Requests refused because of the queue, their key's share or its rate.",
            "reason",
        )

        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", LONG_SECONDS
        )
        self.inter_token_latency: Counted = self._family(
            CountedHistogram,
            "inter_token_latency_seconds",
            "Between two tokens of a request.",
            buckets=SHORT_SECONDS,
        ).labels(*self._values)
        self.time_per_output_token = self._histogram(
            "request_time_per_output_token_seconds",
            "A request's mean time for each token after the first.",
            SHORT_SECONDS,
        )
        self.e2e_request_latency = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end.", LONG_SECONDS
        )
        self.queue_time = self._histogram(
            "request_queue_time_seconds", "From arrival to running.", LONG_SECONDS
        )
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "From running to the first token.", LONG_SECONDS
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "From the first token to the end.", LONG_SECONDS
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "From running to the end.", LONG_SECONDS
        )
        self.request_prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt lengths.", TOKENS
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Answer lengths.", TOKENS
        )
        self.request_params_n = self._histogram(
            "request_params_n", "The n that requests ask for.", SMALL_COUNTS
        )
        self.request_params_max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens that requests ask for.", TOKENS
        )
        self.request_max_num_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "The longest of a request's answers.", TOKENS
        )
        self.request_num_preemptions = self._histogram(
            "request_num_preemptions", "Times that a sequence had to make room.", SMALL_COUNTS
        )
        self.request_prefill_kv_computed_tokens = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that were not in the prefix cache.",
            TOKENS,
        )
        self.batch_size = self._histogram(
            "iteration_num_requests", "Requests that run in a step.", TOKENS
        )
        self.iterations_per_second = self._gauge(
            "iterations_per_second", "Steps in a second, over the last ten seconds."
        )
        self.computed_tokens_per_second = self._gauge(
            "computed_tokens_per_second",
            "Tokens computed in a second, of prompts and answers, likewise.",
        )
        self.generation_tokens_per_second = self._gauge(
            "generation_tokens_per_second", "Tokens generated in a second, likewise."
        )
        self._work = [
            self._counter(
                f"estimated_{what}_per_gpu",
                f"{text} that the steps take at least, by weights and KV cache.",
            )
            for what, text in (
                ("flops", "Operations"),
                ("read_bytes", "Bytes read"),
                ("write_bytes", "Bytes written"),
            )
        ]
        self._block_times = [
            self._histogram(f"kv_block_{what}_seconds", text, LONG_SECONDS)
            for what, text in (
                (
                    "lifetime",
                    "From when a block is handed out to when its cached content is overwritten (a sample).",
                ),
                (
                    "idle_before_evict",
                    "From a cached block's last use to when it is overwritten (a sample).",
                ),
                ("reuse_gap", "Between two uses of a cached block (a sample)."),
            )
        ]
        self._errors = self._family(
            Counter, "errors", "Errors that clients got, by HTTP status.", labels=("code",)
        )
        self._engine_restarts = self._counter(
            "engine_restarts", "Times that the engine died and was started again."
        )
        self.iteration_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in a step.", TOKENS
        )

    def of(self, engine: int) -> Metrics:
        """The same metrics of one of the server's engines: its label tells them apart."""
        label = str(engine)
        return self.engines.get(label) or Metrics(self._prefix, self._values[0], label, self)

    def observe_throughput(self) -> tuple[float, float, float]:
        """Sets each engine's gauges; (steps, tokens computed, tokens generated) in a second, of all together."""
        now, total = time.monotonic(), (0.0, 0.0, 0.0)
        for one in self.engines.values():
            steps, computed, generated = one.throughput.take(now)
            one.iterations_per_second.set(steps)
            one.computed_tokens_per_second.set(computed)
            one.generation_tokens_per_second.set(generated)
            total = (total[0] + steps, total[1] + computed, total[2] + generated)
        return total

    def finished(self, reason: str) -> None:
        """Counts the end of a sequence."""
        self._request_success.labels(*self._values, reason).inc()

    def observe_waiting(self, count: int) -> None:
        """Sets how many requests wait."""
        self.num_requests_waiting.set(count)
        self._num_waiting_by_reason.set(count)

    def observe_prompt(self, num_tokens: int, num_cached: int) -> None:
        """Counts a prompt whose first token has come."""
        self.prompt_tokens.inc(num_tokens)
        self.prompt_tokens_cached.inc(num_cached)
        by_source = self._prompt_tokens_by_source
        by_source.labels(*self._values, "local_cache_hit").inc(num_cached)
        by_source.labels(*self._values, "local_compute").inc(num_tokens - num_cached)
        self.request_prefill_kv_computed_tokens.observe(num_tokens - num_cached)

    def observe_work(self, work: Iterable[float]) -> None:
        """Counts what a step takes: operations, bytes read, bytes written."""
        for counter, amount in zip(self._work, work, strict=True):
            counter.inc(amount)

    def observe_blocks(self, times: Iterable[Iterable[float]]) -> None:
        """Takes in blocks' lifetimes, idle ends and gaps between uses."""
        for histogram, seconds in zip(self._block_times, times, strict=True):
            for one in seconds:
                histogram.observe(one)

    def failed(self, status: int) -> None:
        """Counts an error that a client got."""
        self._errors.labels(str(status)).inc()

    def restarted(self) -> None:
        """Counts another core in the place of one that died."""
        self._engine_restarts.inc()

    def describe(self, name: str, text: str, labels: dict[str, str]) -> None:
        """A gauge that is always 1, for what its labels say."""
        gauge = Gauge(f"{self._prefix}:{name}", text, (*LABELS, *labels), registry=self.registry)
        gauge.labels(*self._values, *labels.values()).set(1)

    def observe_machine(self, *, gpu: bool) -> None:
        """From here on, the server's processes and, on request, the GPUs are told of, too."""
        from toolkit.metrics.machine import GPUMetrics, ProcessMetrics

        self.registry.register(ProcessMetrics(self._prefix))
        if gpu:
            self.registry.register(GPUMetrics(self._prefix))

    def rejected(self, reason: str) -> None:
        """Counts a request that was not let in."""
        self._admission_rejections.labels(*self._values, reason).inc()

    def expose(self) -> bytes:
        """All metrics in Prometheus' text format."""
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
        *further: str,
        labels: tuple[str, ...] = LABELS,
        **options: Any,
    ) -> Any:
        """The metric of this name with all of its series, which engines share. `further`: labels beside `labels`."""
        if name not in self._families:
            full = f"{self._prefix}:{name}"
            self._families[name] = kind(
                full, text, (*labels, *further), registry=self.registry, **options
            )
        return self._families[name]


class HTTPMetrics:
    """Requests to the server, whatever they ask for."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ("method", "status", "handler")
        self._requests = Counter(
            "http_requests", "HTTP requests by method, status and route.", labels, registry=registry
        )
        self._duration = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to the end of its answer.",
            ("method", "handler"),
            buckets=LONG_SECONDS,
            registry=registry,
        )
        tasks = Gauge(
            "http_server_tasks",
            "Tasks of the event loops: some for each open request.",
            registry=registry,
        )
        tasks.set_function(_num_tasks)

    def observe(self, route: object, method: str, status: int, seconds: float) -> None:
        """`route`: what matched, None when nothing did; raw paths would make a series for every typing error."""
        handler = str(getattr(route, "path", "none"))
        family = f"{status // 100}xx" if status else "none"
        self._requests.labels(method, family, handler).inc()
        self._duration.labels(method, handler).observe(seconds)


def _num_tasks() -> int:
    """Of the loop that runs, if one does."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0
