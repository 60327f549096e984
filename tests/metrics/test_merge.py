"""Merging the metrics of several processes."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from toolkit.metrics import HTTPMetrics, Metrics
from toolkit.metrics.merge import Family, expose, merge, snapshot


class Process:
    """Metrics of one process of a server."""

    def __init__(self) -> None:
        self.metrics = Metrics("tk", "m")
        self.http = HTTPMetrics(self.metrics.registry)

    def send(self) -> list[Family]:
        """Return its metrics after encoding and decoding."""
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(snapshot(self.metrics.registry)), type=list[Family]
        )


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def without_creation_times(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {key: value for key, value in samples(text).items() if not key[0].endswith("_created")}


def observe(process: Process, part: int) -> None:
    metrics = process.metrics
    metrics.generation_tokens.inc(7 + part)
    metrics.count_finished("stop" if part else "length")
    metrics.time_to_first_token.observe(0.01 * (1 + part))
    metrics.inter_token_latency.observe(0.002 * (1 + part), 5)
    process.http.observe(None, "GET" if part else "POST", 200, 0.5)


def test_merged_processes_equal_one_that_observed_everything():
    one, several = Process(), [Process(), Process(), Process()]
    several[0].metrics.num_requests_running.set(4)
    one.metrics.num_requests_running.set(4)
    for part, process in enumerate(several):
        observe(process, part)
        observe(one, part)
    expected = without_creation_times(one.metrics.expose())
    merged = without_creation_times(expose(merge(process.send() for process in several)))
    assert merged.keys() == expected.keys()
    assert merged == {key: pytest.approx(value) for key, value in expected.items()}


def test_each_reason_of_an_end_has_a_series_from_the_start():
    found = samples(Process().metrics.expose())
    reasons = {
        dict(labels)["finished_reason"]: value
        for (name, labels), value in found.items()
        if name == "tk:request_success_total"
    }
    assert reasons == dict.fromkeys(("stop", "length", "abort", "error"), 0.0)


def test_merged_creation_time_is_the_earliest():
    processes = [Process(), Process()]
    key = ("tk:generation_tokens_created", frozenset({("model_name", "m"), ("engine", "0")}))
    times = [samples(process.metrics.expose())[key] for process in processes]
    merged = samples(expose(merge(process.send() for process in reversed(processes))))
    assert merged[key] == min(times)


def test_merging_does_not_change_its_inputs():
    snapshots = [Process().send(), Process().send()]
    before = msgspec.msgpack.encode(snapshots)
    merge(snapshots)
    assert msgspec.msgpack.encode(snapshots) == before
