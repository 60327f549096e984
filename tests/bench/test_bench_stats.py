"""From recorded times to a result."""

from __future__ import annotations

import dataclasses
from array import array

import numpy as np
import pytest

from toolkit.bench.load.record import RequestRecord, Share
from toolkit.bench.report.saturation import saturation
from toolkit.bench.report.stats import ErrorGroup, Latencies, evaluate, is_good, max_in_flight
from toolkit.bench.report.steady import (
    Window,
    batch_edges,
    in_flight,
    rate,
    steady_window,
    tokens_between,
)


def record(scheduled, sent, first, last, tokens, **kwargs):
    gaps = array("d", [(last - first) / (tokens - 1)] * (tokens - 1)) if tokens > 1 else array("d")
    return RequestRecord(
        number=0, scheduled=scheduled, woken=sent, sent=sent, first_token=first, last_token=last, ended=last,
        prompt_tokens=10, output_tokens=tokens, max_tokens=tokens, gaps=gaps, sizes=array("q", [1] * len(gaps)), **kwargs,
    )  # fmt: skip


def of(records, *, paced=True, **settings):
    """The result of one client's records."""
    return evaluate([Share(records)], paced=paced, **settings)


class TestLatencies:
    def test_count_from_the_schedule_and_service_times_from_the_send(self):
        result = of([record(scheduled=1.0, sent=3.0, first=3.5, last=4.5, tokens=11)])
        found = result.latencies
        assert found.ttft.mean.value == pytest.approx(2.5)
        assert found.service_ttft.mean.value == pytest.approx(0.5)
        assert found.e2el.mean.value == pytest.approx(3.5)
        assert found.service_e2el.mean.value == pytest.approx(1.5)
        assert found.tpot.mean.value == pytest.approx(0.1)
        assert found.itl.count == 10
        assert result.send_lag.mean.value == pytest.approx(2.0)

    def test_a_gap_is_spread_over_the_tokens_of_its_chunk_and_chunk_gaps_stand_apart(self):
        one = record(0.0, 0.0, 1.0, 2.0, tokens=1)
        one.gaps, one.sizes, one.output_tokens = array("d", [0.6, 0.4]), array("q", [3, 1]), 5
        found = of([one]).latencies
        assert found.itl.count == 4
        assert found.itl.mean.value == pytest.approx(1.0 / 4)
        assert dict(found.itl.percentiles)[50].value == pytest.approx(0.2)
        assert (found.chunk_gap.count, found.chunk_gap.mean.value) == (2, pytest.approx(0.5))

    def test_chunks_of_unknown_size_are_taken_to_carry_alike(self):
        one = record(0.0, 0.0, 1.0, 2.0, tokens=1)
        one.gaps, one.sizes, one.output_tokens, one.sizes_known = (
            array("d", [0.6, 0.4]),
            array("q", [1, 1]),
            6,
            False,
        )
        result = of([one])
        assert not result.sizes_known
        assert result.latencies.itl.mean.value == pytest.approx(
            0.25
        )  # two tokens in each of three chunks
        assert result.latencies.chunk_gap.mean.value == pytest.approx(0.5)

    def test_intervals_know_that_requests_of_one_time_resemble_each_other(self):
        """TTFTs that wander, as those of a queue do: each is nine tenths of the one before, and news."""
        hits = {"mean": 0, "p50": 0}
        for seed in range(100):
            news = np.random.default_rng(seed).normal(0.0, 0.01, 1000)
            ttfts = [0.5]
            for one in news:
                ttfts.append(0.5 + 0.9 * (ttfts[-1] - 0.5) + one)
            records = [
                record(i, i, i + ttft, i + ttft + 1, tokens=2) for i, ttft in enumerate(ttfts)
            ]
            found = Latencies.of(records, (50,)).ttft
            for name, estimate in (("mean", found.mean), ("p50", found.percentiles[0][1])):
                hits[name] += estimate.low <= 0.5 <= estimate.high  # the truth of both
        assert min(hits.values()) >= 85  # of 100; a third were they taken for independent

    def test_failed_requests_count_but_lend_no_latency(self):
        failed = record(0.0, 0.0, 0.1, 0.2, tokens=5)
        failed.error = ("HTTP 503", "The queue is full.")
        result = of([failed, record(0.0, 0.0, 1.0, 2.0, tokens=5)])
        assert (result.num_sent, result.num_succeeded, result.num_failed) == (2, 1, 1)
        assert result.latencies.ttft.count == 1
        assert result.output_tokens == 5


class TestThroughput:
    def test_is_over_the_time_from_the_first_arrival_to_the_last_end(self):
        records = [record(1.0, 1.0, 1.5, 2.0, tokens=5), record(2.0, 2.0, 2.5, 6.0, tokens=15)]
        result = of(records)
        assert result.wall == pytest.approx(5.0)
        assert result.per_second(result.output_tokens) == pytest.approx(20 / 5)
        assert result.per_second(result.prompt_tokens) == pytest.approx(20 / 5)

    def test_what_was_offered_and_what_was_sent_are_told_apart(self):
        result = of([record(i, 2.0 * i, 2 * i + 1.0, 2 * i + 1.5, tokens=2) for i in range(5)])
        assert result.offered_rate == pytest.approx(1.0)
        assert result.sent_rate == pytest.approx(0.5)
        assert of([record(0.0, 0.0, 1.0, 2.0, tokens=2)]).offered_rate is None

    def test_most_requests_at_one_moment(self):
        spans = [(0.0, 2.0), (1.0, 3.0), (2.0, 4.0), (5.0, 6.0)]
        assert max_in_flight([record(s, s, e, e, tokens=1) for s, e in spans]) == 2
        assert max_in_flight([]) == 0


class TestGoodput:
    ONE = record(
        scheduled=0.0, sent=0.1, first=0.3, last=1.3, tokens=11
    )  # TTFT 0.3, TPOT 0.1, E2E 1.3

    @pytest.mark.parametrize(
        ("objectives", "good"),
        [
            ({"ttft": 0.31}, True), ({"ttft": 0.29}, False), ({"tpot": 0.11}, True), ({"tpot": 0.09}, False),
            ({"e2el": 1.31}, True), ({"e2el": 1.29}, False), ({"ttft": 0.31, "tpot": 0.09}, False),
        ],
    )  # fmt: skip
    def test_a_good_request_keeps_every_objective_from_its_schedule_on(self, objectives, good):
        assert is_good(self.ONE, objectives) is good

    def test_one_token_alone_keeps_every_time_per_token(self):
        assert is_good(record(0.0, 0.0, 0.5, 0.5, tokens=1), {"tpot": 0.001})

    def test_those_that_failed_are_not_good(self):
        failed = dataclasses.replace(self.ONE, error=("HTTP 503", "full"))
        result = of([self.ONE, failed], objectives={"ttft": 10.0})
        assert (result.num_good, result.good_share) == (1, 0.5)
        assert of([self.ONE]).good_share is None


class TestSteady:
    def load(self, seconds=60.0, service=4.0, per_second=10.0):
        """Requests that arrive evenly and take `service` seconds each, with 21 tokens."""
        starts = np.arange(0.0, seconds, 1 / per_second)
        return [record(s, s, s + service / 5, s + service, tokens=21) for s in starts.tolist()]

    def test_the_window_begins_when_the_load_has_built_up_and_ends_with_the_last_arrival(self):
        window = steady_window(self.load())
        assert 3.0 <= window.start <= 6.0  # as many end as arrive after 4 s
        assert window.end == pytest.approx(60.0, abs=0.2)

    def test_its_throughput_is_free_of_build_up_and_drain(self):
        result = of(self.load())
        assert result.per_second(result.output_tokens) == pytest.approx(210.0 * 60 / 64, rel=0.01)
        assert result.steady.output_tokens_per_s.value == pytest.approx(210.0, rel=0.01)
        assert result.steady.requests_per_s.value == pytest.approx(10.0, rel=0.01)
        assert result.steady.in_flight == pytest.approx(40.0, rel=0.01)
        assert result.steady.latencies.ttft.count < result.latencies.ttft.count

    def test_a_queue_that_grows_to_the_end_is_not_steady(self):
        growing = [
            record(t, t, t + 0.1 + t, t + 0.2 + t, tokens=2) for t in np.arange(0, 60, 0.1).tolist()
        ]
        assert of(growing).steady is None

    def test_a_ramp_is_not_steady_by_intention(self):
        assert of(self.load(), settles=False).steady is None

    def test_all_at_once_is_not_steady(self):
        assert (
            of([record(0.0, 0.0, i, i + 1.0, tokens=2) for i in range(20)], paced=False).steady
            is None
        )

    def test_requests_in_flight_are_a_mean_over_time(self):
        records = [record(0.0, 0.5, 1.0, 2.5, tokens=2), record(0.0, 1.0, 1.0, 1.5, tokens=2)]
        assert in_flight(records, np.array([0.0, 1.0, 2.0, 4.0])) == pytest.approx([0.5, 1.5, 0.25])

    def test_tokens_are_counted_when_their_chunks_come(self):
        one = record(0.0, 0.0, 1.0, 4.0, tokens=1)
        one.gaps, one.sizes, one.output_tokens = array("d", [1.0, 2.0]), array("q", [4, 2]), 7
        failed = dataclasses.replace(one, error=("HTTP 503", "full"))
        assert tokens_between([one, failed], np.array([0.0, 1.5, 2.5, 5.0])).tolist() == [
            1.0,
            4.0,
            2.0,
        ]

    def test_a_rate_has_the_interval_of_ten_batch_means(self):
        amounts = np.array([9.0, 11, 10, 10, 12, 8, 10, 9, 11, 10])
        found = rate(amounts, 20.0)
        assert found.value == pytest.approx(5.0)
        error = (amounts / 2).std(ddof=1) / 10**0.5
        assert found.high - found.value == pytest.approx(2.262 * error, rel=1e-3)
        assert batch_edges(Window(1.0, 3.0)) == pytest.approx(np.arange(1.0, 3.01, 0.2))


def test_errors_are_grouped_by_cause_the_most_frequent_first():
    records = [RequestRecord(i, scheduled=0.0) for i in range(4)]
    for one, error in zip(records, [("a", "a1"), ("b", "b1"), ("b", "b2"), None], strict=True):
        one.error = error
    result = of(records, paced=False)
    assert result.errors == (ErrorGroup("b", 2, "b1"), ErrorGroup("a", 1, "a1"))


def test_a_request_that_was_never_answered_is_unfinished():
    result = of([RequestRecord(0, scheduled=0.0, woken=0.0, sent=0.0)])
    assert (result.num_sent, result.num_unfinished, result.num_failed) == (1, 1, 0)
    assert result.latencies.ttft is None


class TestSaturation:
    def test_a_client_that_is_late_by_its_schedule_is_saturated(self):
        assert saturation(0.5, 0.0, 0.3, wall=0.5) is not None
        assert saturation(0.001, 0.001, 0.3, wall=10.0) is None

    def test_a_client_that_waited_for_a_core_blames_the_machine(self):
        for late in ((0.5, 0.0), (0.0, 0.5)):
            assert "it used 3% of a core: the machine is busy" in (
                saturation(*late, 0.03, wall=10.0) or ""
            )
            assert "the machine" not in (saturation(*late, 0.9, wall=10.0) or "the machine")

    def test_a_client_without_a_schedule_is_saturated_when_its_core_or_its_loop_is_full(self):
        assert saturation(0.0, 0.001, 0.99, wall=10.0) is not None
        assert saturation(0.0, 0.5, 0.5, wall=10.0) is not None
        assert saturation(0.0, 0.001, 0.5, wall=10.0) is None

    def test_the_opening_burst_of_a_short_run_does_not_count(self):
        assert saturation(0.0, 0.5, 0.99, wall=0.3) is None

    @pytest.mark.parametrize(
        "late",
        [
            Share([], cpu_share=0.99),
            Share([], loop_delays=array("d", [0.5] * 100)),
            Share([record(float(i), i + 0.2, i + 0.5, i + 1.0, tokens=2) for i in range(3)]),
        ],
    )
    def test_one_client_that_is_late_is_enough_to_say_so(self, late):
        fine = [
            Share([record(i / 10, i / 10, i + 1.0, i + 2.0, tokens=2) for i in range(100)])
            for _ in range(9)
        ]
        assert evaluate(fine, paced=True).saturated is None
        assert evaluate([*fine, late], paced=True).saturated is not None


def test_the_records_of_several_clients_count_as_those_of_one():
    records = [record(i, i + 0.1, i + 0.5, i + 1.0, tokens=3 + i) for i in range(6)]
    whole, parts = of(records), evaluate([Share(records[::2]), Share(records[1::2])], paced=True)
    assert (parts.num_clients, whole.num_clients) == (2, 1)
    for name in ("wall", "num_succeeded", "output_tokens", "max_in_flight", "sent_rate"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name))
    for name in ("ttft", "tpot", "itl", "e2el"):
        one, other = getattr(whole.latencies, name), getattr(parts.latencies, name)
        assert (other.mean.value, other.at(90), other.max) == pytest.approx(
            (one.mean.value, one.at(90), one.max)
        )
