"""One reading of a server's metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from toolkit.bench.wire import ServerError

ANCHOR = (
    "num_requests_running"  # every server that this can watch has it; what stands before it is the prefix
)
PREFIXES = ("tk:", "vllm:")

Sample = tuple[Mapping[str, str], float]  # labels, value


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples by name, without the server's prefix. A name has several where there are several engines."""

    time: float  # seconds, monotonic
    samples: Mapping[str, Sequence[Sample]]

    def total(self, name: str) -> float | None:
        """The sum over engines and models; None when the server has no such metric."""
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) if values else None

    def mean(self, name: str) -> float | None:
        values = [value for _, value in self.samples.get(name, ())]
        return sum(values) / len(values) if values else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """The sums for each value of a label."""
        sums: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram: upper bound to the number of observations at or below it, ascending."""
        counts = self.by_label(f"{name}_bucket", "le")
        return dict(sorted((float(bound), count) for bound, count in counts.items()))

    @property
    def start_time(self) -> float | None:
        """When the server's process started, or its counters did, in seconds since 1970."""
        started = self.mean("process_start_time_seconds")
        return self.mean("generation_tokens_created") if started is None else started

    @property
    def model(self) -> str | None:
        """The model that the metrics are labelled with."""
        names = {labels.get("model_name", "") for labels, _ in self.samples.get(ANCHOR, ())}
        return ", ".join(sorted(filter(None, names))) or None


def parse(text: str, time: float) -> Scrape:
    """A scrape from Prometheus text. Raises ServerError when it is none, or not of a server such as ours."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, list[Sample]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, []).append((sample.labels, float(sample.value)))
    except (ValueError, IndexError, KeyError):
        raise ServerError("/metrics is not Prometheus text.") from None
    prefix = find_prefix(found)
    return Scrape(time, {name.removeprefix(prefix): samples for name, samples in found.items()})


def find_prefix(names: Mapping[str, object]) -> str:
    """What stands before the names: `tk:`, `vllm:`... Raises ServerError when it knows none of the names."""
    for prefix in PREFIXES:
        if prefix + ANCHOR in names:
            return prefix
    for name in names:
        if re.fullmatch(rf"\w+:{ANCHOR}", name):
            return name.removesuffix(ANCHOR)
    raise ServerError(f"/metrics has no {PREFIXES[0]}{ANCHOR}: it is not the metrics of a tk server.")
