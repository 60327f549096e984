"""What several processes have counted, as one."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from toolkit.metrics import HTTPMetrics, Metrics
from toolkit.metrics.merge import Family, exposed, merged, snapshot


class Process:
    """One of the server's, as far as its metrics go."""

    def __init__(self) -> None:
        self.metrics = Metrics("tk", "m")
        self.http = HTTPMetrics(self.metrics.registry)

    def told(self) -> list[Family]:
        """Its metrics as they come over a socket."""
        return msgspec.msgpack.decode(
            msgspec.msgpack.encode(snapshot(self.metrics.registry)), type=list[Family]
        )


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def without_moments(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {key: value for key, value in samples(text).items() if not key[0].endswith("_created")}


def observe(process: Process, part: int) -> None:
    metrics = process.metrics
    metrics.generation_tokens.inc(7 + part)
    metrics.finished("stop" if part else "length")
    metrics.time_to_first_token.observe(0.01 * (1 + part))
    metrics.inter_token_latency.observe(0.002 * (1 + part), 5)
    process.http.observe(None, "GET" if part else "POST", 200, 0.5)


def test_several_processes_say_together_what_one_would_that_saw_everything():
    one, several = Process(), [Process(), Process(), Process()]
    several[0].metrics.num_requests_running.set(4)
    one.metrics.num_requests_running.set(4)
    for part, process in enumerate(several):
        observe(process, part)
        observe(one, part)
    expected = without_moments(one.metrics.expose())
    told = without_moments(exposed(merged(process.told() for process in several)))
    assert told.keys() == expected.keys()
    assert told == {key: pytest.approx(value) for key, value in expected.items()}


def test_the_moment_of_creation_is_the_earliest():
    processes = [Process(), Process()]
    key = ("tk:generation_tokens_created", frozenset({("model_name", "m"), ("engine", "0")}))
    moments = [samples(process.metrics.expose())[key] for process in processes]
    told = samples(exposed(merged(process.told() for process in reversed(processes))))
    assert told[key] == min(moments)


def test_merging_changes_nothing_of_what_was_told():
    told = [Process().told(), Process().told()]
    before = msgspec.msgpack.encode(told)
    merged(told)
    assert msgspec.msgpack.encode(told) == before
