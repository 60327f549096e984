from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from toolkit.bench.record import RequestRecord, Share
from toolkit.bench.stats import ErrorGroup, Summary, evaluate, max_in_flight, saturation


def record(scheduled, sent, first, last, tokens, **kwargs):
    gaps = array("d", [(last - first) / (tokens - 1)] * (tokens - 1)) if tokens > 1 else array("d")
    return RequestRecord(
        scheduled=scheduled, woken=sent, sent=sent, first_token=first, last_token=last, ended=last,
        prompt_tokens=10, output_tokens=tokens, max_tokens=tokens, gaps=gaps, **kwargs,
    )  # fmt: skip


def of(records, *, paced=True):
    """The result of one client's records."""
    return evaluate([Share(records)], paced=paced)


def summary(p90):
    return Summary(mean=p90, p50=p90, p90=p90, p99=p90, max=p90, count=100)


def percentile(values, share):
    """By the definition: linear between the two nearest ranks."""
    values = sorted(values)
    rank = share * (len(values) - 1)
    low = int(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (rank - low)


@pytest.mark.parametrize("count", [1, 2, 7, 100, 1013])
def test_percentiles_are_those_of_the_definition(count):
    values = np.random.default_rng(count).lognormal(size=count).tolist()
    found = Summary.of(values)
    assert found.mean == pytest.approx(sum(values) / count)
    assert [found.p50, found.p90, found.p99] == pytest.approx(
        [percentile(values, s) for s in (0.5, 0.9, 0.99)]
    )
    assert (found.max, found.count) == (max(values), count)


def test_there_is_no_summary_of_nothing():
    assert Summary.of([]) is None


def test_latency_counts_from_the_schedule_and_service_time_from_the_send():
    result = of([record(scheduled=1.0, sent=3.0, first=3.5, last=4.5, tokens=11)])
    assert result.ttft.mean == pytest.approx(2.5)
    assert result.ttft_from_send.mean == pytest.approx(0.5)
    assert result.e2e.mean == pytest.approx(3.5)
    assert result.e2e_from_send.mean == pytest.approx(1.5)
    assert result.tpot.mean == pytest.approx(0.1)
    assert result.itl.count == 10
    assert result.send_lag.mean == pytest.approx(2.0)


def test_throughput_is_over_the_time_from_the_first_arrival_to_the_last_end():
    records = [record(1.0, 1.0, 1.5, 2.0, tokens=5), record(2.0, 2.0, 2.5, 6.0, tokens=15)]
    result = of(records)
    assert result.wall == pytest.approx(5.0)
    assert result.per_second(result.output_tokens) == pytest.approx(20 / 5)
    assert result.per_second(result.prompt_tokens) == pytest.approx(20 / 5)
    assert result.send_rate == pytest.approx(1.0)


def test_failed_requests_count_but_lend_no_latency():
    failed = record(0.0, 0.0, 0.1, 0.2, tokens=5)
    failed.error = ("HTTP 503", "The queue is full.")
    result = of([failed, record(0.0, 0.0, 1.0, 2.0, tokens=5)])
    assert (result.num_sent, result.num_succeeded, result.num_failed) == (2, 1, 1)
    assert result.ttft.count == 1
    assert result.output_tokens == 5


def test_errors_are_grouped_by_cause_the_most_frequent_first():
    records = [RequestRecord(scheduled=0.0) for _ in range(4)]
    for one, error in zip(records, [("a", "a1"), ("b", "b1"), ("b", "b2"), None], strict=True):
        one.error = error
    result = of(records, paced=False)
    assert result.errors == (ErrorGroup("b", 2, "b1"), ErrorGroup("a", 1, "a1"))


def test_a_request_that_was_never_answered_is_unfinished():
    result = of([RequestRecord(scheduled=0.0, woken=0.0, sent=0.0)])
    assert (result.num_sent, result.num_unfinished, result.num_failed) == (1, 1, 0)
    assert result.ttft is None


def test_most_requests_at_one_moment():
    spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
    assert max_in_flight([record(s, s, e, e, tokens=1) for s, e in spans]) == 2
    assert max_in_flight([]) == 0


def test_a_client_that_is_late_by_its_schedule_is_saturated():
    assert saturation(summary(0.5), None, 0.3, wall=0.5) is not None
    assert saturation(summary(0.001), summary(0.001), 0.3, wall=10.0) is None


def test_a_client_without_a_schedule_is_saturated_when_its_core_or_its_loop_is_full():
    assert saturation(None, summary(0.001), 0.99, wall=10.0) is not None
    assert saturation(None, summary(0.5), 0.5, wall=10.0) is not None
    assert saturation(None, summary(0.001), 0.5, wall=10.0) is None


def test_the_opening_burst_of_a_short_run_does_not_count():
    assert saturation(None, summary(0.5), 0.99, wall=0.3) is None


def test_the_records_of_several_clients_count_as_those_of_one():
    records = [record(i, i + 0.1, i + 0.5, i + 1.0, tokens=3 + i) for i in range(6)]
    whole, parts = of(records), evaluate([Share(records[::2]), Share(records[1::2])], paced=True)
    assert (parts.num_clients, whole.num_clients) == (2, 1)
    for name in ("wall", "num_succeeded", "output_tokens", "max_in_flight", "send_rate"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    for name in ("ttft", "tpot", "itl", "e2e", "send_lag"):
        assert dataclasses.astuple(getattr(parts, name)) == pytest.approx(
            dataclasses.astuple(getattr(whole, name))
        )


@pytest.mark.parametrize(
    "late",
    [
        Share([], cpu_share=0.99),
        Share([], loop_delays=array("d", [0.5] * 100)),
        Share([record(float(i), i + 0.2, i + 0.5, i + 1.0, tokens=2) for i in range(3)]),
    ],
)
def test_one_client_that_is_late_is_enough_to_say_so(late):
    fine = [Share([record(i / 10, i / 10, i + 1.0, i + 2.0, tokens=2) for i in range(100)]) for _ in range(9)]
    assert evaluate(fine, paced=True).saturated is None
    assert evaluate([*fine, late], paced=True).saturated is not None
