"""Merge the metrics of a server's processes."""

from collections.abc import Iterable
from itertools import chain

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector


class Sample(msgspec.Struct, array_like=True):
    name: str  # with suffix: _total, _bucket, ...
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """A metric with all of its samples. `kind` is Prometheus' type."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """Return the metrics of a process as a message."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merge(snapshots: Iterable[list[Family]]) -> list[Family]:
    """Add up samples of the same name and labels. Of creation times, take the earliest.

    Gauges are added too: one process sets a gauge and the others leave it at 0, or each sets its
    part."""
    families: dict[str, Family] = {}
    known: dict[tuple[str, ...], Sample] = {}
    for family in chain.from_iterable(snapshots):
        total = families.setdefault(family.name, Family(family.name, family.text, family.kind, []))
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            sample_sum = known.get(key)
            if sample_sum is None:
                known[key] = Sample(sample.name, sample.labels, sample.value)
                total.samples.append(known[key])
            elif sample.name.endswith("_created"):
                sample_sum.value = min(sample_sum.value, sample.value)
            else:
                sample_sum.value += sample.value
    return list(families.values())


def expose(families: list[Family]) -> bytes:
    """Return the families in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
