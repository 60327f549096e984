"""CountedHistogram against Prometheus' Histogram."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from toolkit.metrics import SHORT_SECONDS, CountedHistogram


def lines(registry: CollectorRegistry) -> list[str]:
    return [
        line
        for line in generate_latest(registry).decode().splitlines()
        if not line.startswith("#") and "_created" not in line
    ]


def test_counted_histogram_equals_prometheus_histogram():
    rng = random.Random(0)
    reference, registry = CollectorRegistry(), CollectorRegistry()
    labels = {"model_name": "m", "engine": "0"}
    histogram = Histogram(
        "gap", "Text.", list(labels), buckets=SHORT_SECONDS, registry=reference
    ).labels(*labels.values())
    family = CountedHistogram(
        "gap", "Text.", list(labels), buckets=SHORT_SECONDS, registry=registry
    )
    counted = family.labels(*labels.values())
    values = [
        SHORT_SECONDS[0],
        SHORT_SECONDS[3],
        0.0,
        99.0,
        *(2 ** -rng.randrange(12) for _ in range(20)),
    ]
    for value in values:
        count = rng.randrange(1, 5)
        counted.observe(value, count)
        for _ in range(count):
            histogram.observe(value)
    expected, got = lines(reference), lines(registry)
    assert len(got) > len(SHORT_SECONDS)
    assert [line.rpartition(" ")[0] for line in got] == [
        line.rpartition(" ")[0] for line in expected
    ]
    for line, other in zip(got, expected, strict=True):
        assert abs(float(line.rpartition(" ")[2]) - float(other.rpartition(" ")[2])) < 1e-9
