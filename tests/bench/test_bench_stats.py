"""Statistics of recorded times."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from toolkit.bench.load.record import ClientResult, RequestRecord
from toolkit.bench.report.saturation import saturation
from toolkit.bench.report.stats import ErrorGroup, Latencies, evaluate, is_good, max_in_flight
from toolkit.bench.report.steady import (
    TimeWindow,
    batch_edges,
    in_flight,
    rate,
    steady_window,
    tokens_between,
)


def record(scheduled, sent, first, last, tokens, **kwargs):
    gaps = array("d", [(last - first) / (tokens - 1)] * (tokens - 1)) if tokens > 1 else array("d")
    return RequestRecord(
        number=0, scheduled=scheduled, started=sent, sent=sent, first_token=first, last_token=last,
        ended=last, prompt_tokens=10, output_tokens=tokens, max_tokens=tokens, chunk_gaps=gaps,
        chunk_tokens=array("q", [1] * len(gaps)), **kwargs,
    )  # fmt: skip


def evaluate_one(records, *, is_paced=True, **settings):
    """Evaluate the records of one client."""
    return evaluate([ClientResult(records)], is_paced=is_paced, **settings)


class TestLatencies:
    def test_count_from_the_schedule_and_from_sending(self):
        result = evaluate_one([record(scheduled=1.0, sent=3.0, first=3.5, last=4.5, tokens=11)])
        found = result.latencies
        assert found.ttft.mean.value == pytest.approx(2.5)
        assert found.service_ttft.mean.value == pytest.approx(0.5)
        assert found.e2el.mean.value == pytest.approx(3.5)
        assert found.service_e2el.mean.value == pytest.approx(1.5)
        assert found.tpot.mean.value == pytest.approx(0.1)
        assert found.itl.count == 10
        assert result.send_lag.mean.value == pytest.approx(2.0)

    def test_gap_is_spread_over_the_tokens_of_its_chunk(self):
        one = record(0.0, 0.0, 1.0, 2.0, tokens=1)
        one.chunk_gaps, one.chunk_tokens, one.output_tokens = (
            array("d", [0.6, 0.4]),
            array("q", [3, 1]),
            5,
        )
        found = evaluate_one([one]).latencies
        assert found.itl.count == 4
        assert found.itl.mean.value == pytest.approx(1.0 / 4)
        assert dict(found.itl.percentiles)[50].value == pytest.approx(0.2)
        assert (found.chunk_gap.count, found.chunk_gap.mean.value) == (2, pytest.approx(0.5))

    def test_chunks_of_unknown_size_count_equally(self):
        one = record(0.0, 0.0, 1.0, 2.0, tokens=1)
        one.chunk_gaps, one.chunk_tokens, one.output_tokens, one.has_token_counts = (
            array("d", [0.6, 0.4]),
            array("q", [1, 1]),
            6,
            False,
        )
        result = evaluate_one([one])
        assert not result.has_token_counts
        # Two tokens in each of three chunks.
        assert result.latencies.itl.mean.value == pytest.approx(0.25)
        assert result.latencies.chunk_gap.mean.value == pytest.approx(0.5)

    def test_intervals_account_for_correlated_requests(self):
        """TTFTs form an autoregressive process with a coefficient of 0.9, similar to a queue."""
        hits = {"mean": 0, "p50": 0}
        for seed in range(40):
            noise = np.random.default_rng(seed).normal(0.0, 0.01, 1000)
            ttfts = [0.5]
            for one in noise:
                ttfts.append(0.5 + 0.9 * (ttfts[-1] - 0.5) + one)
            records = [
                record(i, i, i + ttft, i + ttft + 1, tokens=2) for i, ttft in enumerate(ttfts)
            ]
            found = Latencies.of(records, (50,)).ttft
            for name, estimate in (("mean", found.mean), ("p50", found.percentiles[0][1])):
                hits[name] += estimate.low <= 0.5 <= estimate.high  # the true mean and median
        assert min(hits.values()) >= 34  # of 40; about 13 if requests were treated as independent

    def test_failed_requests_count_but_have_no_latency(self):
        failed = record(0.0, 0.0, 0.1, 0.2, tokens=5)
        failed.error = ("HTTP 503", "The queue is full.")
        result = evaluate_one([failed, record(0.0, 0.0, 1.0, 2.0, tokens=5)])
        assert (result.num_sent, result.num_succeeded, result.num_failed) == (2, 1, 1)
        assert result.latencies.ttft.count == 1
        assert result.output_tokens == 5


class TestThroughput:
    def test_spans_the_first_arrival_to_the_last_end(self):
        records = [record(1.0, 1.0, 1.5, 2.0, tokens=5), record(2.0, 2.0, 2.5, 6.0, tokens=15)]
        result = evaluate_one(records)
        assert result.wall == pytest.approx(5.0)
        assert result.per_second(result.output_tokens) == pytest.approx(20 / 5)
        assert result.per_second(result.prompt_tokens) == pytest.approx(20 / 5)

    def test_offered_and_sent_rates_are_separate(self):
        result = evaluate_one(
            [record(i, 2.0 * i, 2 * i + 1.0, 2 * i + 1.5, tokens=2) for i in range(5)]
        )
        assert result.offered_rate == pytest.approx(1.0)
        assert result.sent_rate == pytest.approx(0.5)
        assert evaluate_one([record(0.0, 0.0, 1.0, 2.0, tokens=2)]).offered_rate is None

    def test_max_in_flight_counts_overlapping_requests(self):
        spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
        assert max_in_flight([record(s, s, e, e, tokens=1) for s, e in spans]) == 2
        assert max_in_flight([]) == 0


class TestGoodput:
    # TTFT 0.3, TPOT 0.1, E2E 1.3
    ONE = record(scheduled=0.0, sent=0.1, first=0.3, last=1.3, tokens=11)

    @pytest.mark.parametrize(
        ("objectives", "good"),
        [
            ({"ttft": 0.31}, True), ({"ttft": 0.29}, False),
            ({"tpot": 0.11}, True), ({"tpot": 0.09}, False),
            ({"e2el": 1.31}, True), ({"e2el": 1.29}, False),
            ({"ttft": 0.31, "tpot": 0.09}, False),
        ],
    )  # fmt: skip
    def test_good_request_meets_every_objective(self, objectives, good):
        assert is_good(self.ONE, objectives) is good

    def test_single_token_meets_any_tpot(self):
        assert is_good(record(0.0, 0.0, 0.5, 0.5, tokens=1), {"tpot": 0.001})

    def test_failed_requests_are_not_good(self):
        failed = dataclasses.replace(self.ONE, error=("HTTP 503", "full"))
        result = evaluate_one([self.ONE, failed], objectives={"ttft": 10.0})
        assert (result.num_good, result.good_share) == (1, 0.5)
        assert evaluate_one([self.ONE]).good_share is None


class TestSteady:
    def load(self, seconds=60.0, service=4.0, per_second=10.0):
        """Return requests that arrive evenly and take `service` seconds for 21 tokens."""
        starts = np.arange(0.0, seconds, 1 / per_second)
        return [record(s, s, s + service / 5, s + service, tokens=21) for s in starts.tolist()]

    def test_window_spans_the_end_of_build_up_to_the_last_arrival(self):
        window = steady_window(self.load())
        assert 3.0 <= window.start <= 6.0  # after 4 s as many end as arrive
        assert window.end == pytest.approx(60.0, abs=0.2)

    def test_throughput_excludes_build_up_and_drain(self):
        result = evaluate_one(self.load())
        assert result.per_second(result.output_tokens) == pytest.approx(210.0 * 60 / 64, rel=0.01)
        assert result.steady.output_tokens_per_s.value == pytest.approx(210.0, rel=0.01)
        assert result.steady.requests_per_s.value == pytest.approx(10.0, rel=0.01)
        assert result.steady.in_flight == pytest.approx(40.0, rel=0.01)
        assert result.steady.latencies.ttft.count < result.latencies.ttft.count

    def test_growing_queue_is_not_steady(self):
        growing = [
            record(t, t, t + 0.1 + t, t + 0.2 + t, tokens=2) for t in np.arange(0, 60, 0.1).tolist()
        ]
        assert evaluate_one(growing).steady is None

    def test_ramp_is_not_steady(self):
        assert evaluate_one(self.load(), is_steady_load=False).steady is None

    def test_burst_is_not_steady(self):
        assert (
            evaluate_one(
                [record(0.0, 0.0, i, i + 1.0, tokens=2) for i in range(20)], is_paced=False
            ).steady
            is None
        )

    def test_requests_in_flight_are_averaged_over_time(self):
        records = [record(0.0, 0.5, 1.0, 2.5, tokens=2), record(0.0, 1.0, 1.0, 1.5, tokens=2)]
        assert in_flight(records, np.array([0.0, 1.0, 2.0, 4.0])) == pytest.approx([0.5, 1.5, 0.25])

    def test_tokens_are_counted_when_their_chunks_arrive(self):
        one = record(0.0, 0.0, 1.0, 4.0, tokens=1)
        one.chunk_gaps, one.chunk_tokens, one.output_tokens = (
            array("d", [1.0, 2.0]),
            array("q", [4, 2]),
            7,
        )
        failed = dataclasses.replace(one, error=("HTTP 503", "full"))
        assert tokens_between([one, failed], np.array([0.0, 1.5, 2.5, 5.0])).tolist() == [
            1.0,
            4.0,
            2.0,
        ]

    def test_rate_interval_is_that_of_ten_batch_means(self):
        amounts = np.array([9.0, 11, 10, 10, 12, 8, 10, 9, 11, 10])
        found = rate(amounts, 20.0)
        assert found.value == pytest.approx(5.0)
        error = (amounts / 2).std(ddof=1) / 10**0.5
        assert found.high - found.value == pytest.approx(2.262 * error, rel=1e-3)
        assert batch_edges(TimeWindow(1.0, 3.0)) == pytest.approx(np.arange(1.0, 3.01, 0.2))


def test_errors_are_grouped_by_cause_most_frequent_first():
    records = [RequestRecord(i, scheduled=0.0) for i in range(4)]
    for one, error in zip(records, [("a", "a1"), ("b", "b1"), ("b", "b2"), None], strict=True):
        one.error = error
    result = evaluate_one(records, is_paced=False)
    assert result.errors == (ErrorGroup("b", 2, "b1"), ErrorGroup("a", 1, "a1"))


def test_unanswered_request_is_unfinished():
    result = evaluate_one([RequestRecord(0, scheduled=0.0, started=0.0, sent=0.0)])
    assert (result.num_sent, result.num_unfinished, result.num_failed) == (1, 1, 0)
    assert result.latencies.ttft is None


class TestSaturation:
    def test_client_that_sends_late_is_saturated(self):
        assert saturation(0.5, 0.0, 0.3, wall=0.5) is not None
        assert saturation(0.001, 0.001, 0.3, wall=10.0) is None

    def test_late_client_with_low_cpu_use_blames_the_machine(self):
        for late in ((0.5, 0.0), (0.0, 0.5)):
            assert "it used 3% of a core: the machine is busy" in (
                saturation(*late, 0.03, wall=10.0) or ""
            )
            assert "the machine" not in (saturation(*late, 0.9, wall=10.0) or "the machine")

    def test_client_is_saturated_if_its_core_or_event_loop_is(self):
        assert saturation(0.0, 0.001, 0.99, wall=10.0) is not None
        assert saturation(0.0, 0.5, 0.5, wall=10.0) is not None
        assert saturation(0.0, 0.001, 0.5, wall=10.0) is None

    def test_initial_burst_of_a_short_run_does_not_count(self):
        assert saturation(0.0, 0.5, 0.99, wall=0.3) is None

    @pytest.mark.parametrize(
        "late",
        [
            ClientResult([], cpu_share=0.99),
            ClientResult([], loop_delays=array("d", [0.5] * 100)),
            ClientResult([record(float(i), i + 0.2, i + 0.5, i + 1.0, tokens=2) for i in range(3)]),
        ],
    )
    def test_one_late_client_saturates_the_run(self, late):
        fine = [
            ClientResult([record(i / 10, i / 10, i + 1.0, i + 2.0, tokens=2) for i in range(100)])
            for _ in range(9)
        ]
        assert evaluate(fine, is_paced=True).saturated is None
        assert evaluate([*fine, late], is_paced=True).saturated is not None


def test_records_of_several_clients_count_like_those_of_one():
    records = [record(i, i + 0.1, i + 0.5, i + 1.0, tokens=3 + i) for i in range(6)]
    single = evaluate_one(records)
    several = evaluate([ClientResult(records[::2]), ClientResult(records[1::2])], is_paced=True)
    assert (several.num_clients, single.num_clients) == (2, 1)
    for name in ("wall", "num_succeeded", "output_tokens", "max_in_flight", "sent_rate"):
        assert getattr(several, name) == pytest.approx(getattr(single, name))
    for name in ("ttft", "tpot", "itl", "e2el"):
        one, other = getattr(single.latencies, name), getattr(several.latencies, name)
        assert (other.mean.value, other.at(90), other.max) == pytest.approx(
            (one.mean.value, one.at(90), one.max)
        )
