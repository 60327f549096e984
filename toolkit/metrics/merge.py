"""One server's metrics from those of its processes."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector


class Sample(msgspec.Struct, array_like=True):
    """One number, under its full name."""

    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, array_like=True):
    """A metric and all of its samples; `kind` is Prometheus' type."""

    name: str
    text: str
    kind: str
    samples: list[Sample]


def snapshot(registry: CollectorRegistry) -> list[Family]:
    """What a process has counted, as a message can carry it."""
    return [
        Family(
            metric.name,
            metric.documentation,
            metric.type,
            [Sample(sample.name, sample.labels, sample.value) for sample in metric.samples],
        )
        for metric in registry.collect()
    ]


def merged(snapshots: Iterable[list[Family]]) -> list[Family]:
    """The sums of all samples. A moment of creation is the earliest one.

    A gauge is to be set by one process alone, in the others it is 0; or each process has its part of it.
    """
    families: dict[str, Family] = {}
    known: dict[tuple[str, ...], Sample] = {}
    for family in (family for taken in snapshots for family in taken):
        mine = families.setdefault(family.name, Family(family.name, family.text, family.kind, []))
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            before = known.get(key)
            if before is None:
                known[key] = Sample(sample.name, sample.labels, sample.value)
                mine.samples.append(known[key])
            elif sample.name.endswith("_created"):
                before.value = min(before.value, sample.value)
            else:
                before.value += sample.value
    return list(families.values())


def exposed(families: list[Family]) -> bytes:
    """The families in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """What Prometheus reads."""
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric
