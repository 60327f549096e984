"""Parser for the Prometheus text that the dashboard needs.

A server's text has a thousand lines, and only the values change. Names and labels are parsed once
and cached, which makes this twenty times as fast as the general parser."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from toolkit.client.wire import ServerError
from toolkit.top.readings.reading import Histogram

ANCHOR = "num_requests_running"  # every supported server has it, after its prefix
PREFIXES = ("tk:", "vllm:")
MAX_SERIES = 50_000  # in the cache

HISTOGRAMS = {
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "time_per_output_token_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "iteration_num_requests",
    "iteration_tokens_total",
    "request_prompt_tokens",
    "request_generation_tokens",
}
CREATED = "generation_tokens_created"  # the only creation time that is read
MEANS = {CREATED, "kv_cache_usage_perc", "gpu_utilization_perc", "gpu_temperature_celsius"}
PARTS = {
    "request_success_total": "finished_reason",
    "admission_rejections_total": "reason",
    "errors_total": "code",
    "process_cpu_seconds_total": "process",
    "process_resident_memory_bytes": "process",
    "gpu_utilization_perc": "gpu",
    "gpu_power_watts": "gpu",
    "spec_decode_num_accepted_tokens_per_pos_total": "position",
    "lora_requests_running": "lora_name",
    "lora_requests_waiting": "lora_name",
}  # metrics that are also read by label
INFOS = {"build_info", "config_info", "cache_config_info"}
RENAMED = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries_total": "prefix_cache_queries_total",
    "gpu_prefix_cache_hits_total": "prefix_cache_hits_total",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}  # names in older versions of vLLM, and the current ones

_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"')
_SERIES = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\s*(?:\{.*\})?")
_ESCAPED = re.compile(r"\\(.)")


class ParsedMetrics(NamedTuple):
    """Metrics by name without the prefix."""

    numbers: dict[str, float]
    parts: dict[str, dict[str, float]]
    histograms: dict[str, Histogram]
    labels: dict[str, str]
    model: str


class Parser:
    """Parser for the successive texts of one server."""

    def __init__(self) -> None:
        self._series: dict[str, tuple[str, dict[str, str]]] = {}

    def parse(self, text: str) -> ParsedMetrics:
        """Parse a text. Raises ServerError if it is not Prometheus text of a tk or vLLM server."""
        samples = [self._sample(line) for line in text.split("\n") if line and line[0] != "#"]
        prefix = find_prefix({name for name, _, _ in samples})
        wanted = (prefix, "process_")
        return _gather(
            (name.removeprefix(prefix), labels, value)
            for name, labels, value in samples
            if name.startswith(wanted)
            and (not name.endswith("_created") or name == prefix + CREATED)
        )

    def _sample(self, line: str) -> tuple[str, dict[str, str], float]:
        end = line.rfind("}") + 1 or line.find(" ")
        key = line[:end]
        try:
            known = self._series.get(key)
            if known is None:
                known = _parse_series(key)
                if len(self._series) < MAX_SERIES:
                    self._series[key] = known
            return (*known, float(line[end:].split(None, 1)[0]))
        except (ValueError, IndexError):
            raise ServerError("/metrics is not Prometheus text.") from None


def _parse_series(key: str) -> tuple[str, dict[str, str]]:
    """Return (name, labels). Raises ValueError if `key` is not a series."""
    if not _SERIES.fullmatch(key):
        raise ValueError(key)
    name, _, labels = key.partition("{")
    return name.strip(), {label: _unescape(value) for label, value in _LABEL.findall(labels)}


def _unescape(value: str) -> str:
    return (
        _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value)
        if "\\" in value
        else value
    )


def find_prefix(names: set[str]) -> str:
    """Return the prefix of the names: `tk:`, `vllm:`, ... Raises ServerError if there is none."""
    for prefix in PREFIXES:
        if prefix + ANCHOR in names:
            return prefix
    for name in names:
        if re.fullmatch(rf"\w+:{ANCHOR}", name):
            return name.removesuffix(ANCHOR)
    raise ServerError(
        f"/metrics has no {PREFIXES[0]}{ANCHOR}: it does not come from a tk or vLLM server."
    )


def _gather(samples: Iterable[tuple[str, dict[str, str], float]]) -> ParsedMetrics:
    """Add up the samples of engines and models."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    parts: dict[str, defaultdict[str, float]] = {}
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    infos: dict[str, str] = {}
    models: set[str] = set()
    for name, labels, value in samples:
        base, _, kind = name.rpartition("_")
        if kind == "bucket":
            if base in HISTOGRAMS:
                buckets[base][float(labels["le"])] += value
            continue
        if name in INFOS:
            infos |= {
                label: text
                for label, text in labels.items()
                if label not in infos and text != "None"
            }
            continue
        found[name].append(value)
        if name == ANCHOR:
            models.add(labels.get("model_name", ""))
        label = PARTS.get(name)
        if label in labels:
            parts.setdefault(name, defaultdict(float))[labels[label]] += value
        elif label == "process":  # standard metric of the process that serves /metrics
            parts.setdefault(name, defaultdict(float))["server"] += value
    numbers = {
        name: sum(values) / len(values) if name in MEANS else sum(values)
        for name, values in found.items()
    }
    histograms = {name: _histogram(name, numbers, counts) for name, counts in buckets.items()}
    for old, new in RENAMED.items():
        if old in numbers:
            numbers.setdefault(new, numbers.pop(old))
        if old in histograms:
            histograms.setdefault(new, histograms.pop(old))
    return ParsedMetrics(
        {name: value for name, value in numbers.items() if math.isfinite(value)},
        {name: dict(values) for name, values in parts.items()},
        histograms,
        infos,
        ", ".join(sorted(filter(None, models))),
    )


def _histogram(name: str, numbers: dict[str, float], cumulative: dict[float, float]) -> Histogram:
    """Build a histogram from cumulative counts; move its sum and count out of `numbers`."""
    buckets = []
    lower, below = 0.0, 0.0
    for bound, count in sorted(cumulative.items()):
        upper = lower if math.isinf(bound) else bound
        if count > below:
            buckets.append((lower, upper, count - below))
        lower, below = upper, count
    return Histogram(numbers.pop(f"{name}_count", below), numbers.pop(f"{name}_sum", 0.0), buckets)
