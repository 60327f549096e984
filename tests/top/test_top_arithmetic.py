from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.top.drawing.bands import NUM_BANDS, band_of, lower_bound, spread
from toolkit.top.readings.arithmetic import (
    increase,
    latency,
    observed,
    quantiles,
    restarted,
    tightened,
    together,
)
from toolkit.top.readings.parse import Parser
from toolkit.top.readings.reading import Histogram, Reading
from toolkit.top.readings.server import HISTORY, KEPT, Server
from toolkit.top.view import charted, view_of


def reading(text, time, url="http://a"):
    """A reading of Prometheus text."""
    found = Parser().parse(text)
    return Reading(url, time, 1.8e9 + time, numbers=found.numbers, parts=found.parts, histograms=found.histograms,
                   labels=found.labels, model=found.model)  # fmt: skip


def prometheus(buckets, q):
    """`histogram_quantile`, as its documentation says it: cumulative counts by ascending bound, the last one +Inf."""
    bounds, counts = list(buckets), list(buckets.values())
    wanted = q * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= wanted)
    if math.isinf(bounds[index]):
        return bounds[index - 1]
    lower, before = (0.0, 0.0) if index == 0 else (bounds[index - 1], counts[index - 1])
    return lower + (bounds[index] - lower) * (wanted - before) / (counts[index] - before)


def pieces_of(buckets):
    made, lower, below = [], 0.0, 0.0
    for bound, count in buckets.items():
        upper = lower if math.isinf(bound) else bound
        if count > below:
            made.append((lower, upper, count - below))
        lower, below = upper, count
    return made


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ({1.0: 10, math.inf: 10}, 0.5, 0.5),  # evenly spread from 0
        ({1.0: 0, 2.0: 10, math.inf: 10}, 0.5, 1.5),
        ({1.0: 50, 2.0: 90, 4.0: 100, math.inf: 100}, 0.9, 2.0),
        ({1.0: 50, 2.0: 90, 4.0: 100, math.inf: 100}, 0.99, 3.8),
        ({1.0: 50, 2.0: 50, 4.0: 100, math.inf: 100}, 0.75, 3.0),  # an empty bucket in between
        ({1.0: 5, math.inf: 10}, 0.99, 1.0),  # beyond the last bound: that bound
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles_interpolate_within_a_bucket(buckets, q, expected):
    assert quantiles(pieces_of(buckets), (q,)) == [
        None if expected is None else pytest.approx(expected)
    ]


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 50), min_size=2, max_size=12).filter(any), q=st.floats(0.01, 1.0)
)
def test_quantiles_of_one_histogram_are_prometheus_s(counts, q):
    bounds = [0.001 * 1.5**i for i in range(len(counts) - 1)] + [math.inf]
    cumulative = dict(zip(bounds, np.cumsum(counts).tolist(), strict=True))
    assert quantiles(pieces_of(cumulative), (q,))[0] == pytest.approx(
        prometheus(cumulative, q), rel=1e-6, abs=1e-9
    )


def test_quantiles_over_servers_with_different_bounds_are_those_of_all_observations():
    rng = np.random.default_rng(1)
    pieces = [(0.0, 0.3, 300), (0.3, 1.0, 500), (0.1, 0.5, 900), (0.5, 4.0, 100), (4.0, 4.0, 20)]
    drawn = np.concatenate([rng.uniform(low, high, 400 * count) for low, high, count in pieces])
    wanted = (0.1, 0.5, 0.9, 0.99)
    assert quantiles(pieces, wanted) == pytest.approx(np.quantile(drawn, wanted).tolist(), rel=0.01)


def test_a_coarse_first_bucket_gives_way_to_what_the_sum_says():
    waits = np.random.default_rng(3).exponential(0.004, 20_000)
    buckets = {
        0.3: len(waits),
        1.0: len(waits) + 10,
        math.inf: len(waits) + 10,
    }  # vLLM's, of the time in its queue
    told = Histogram(len(waits) + 10, waits.sum() + 10 * 0.301, pieces_of(buckets))
    found = latency(tightened(told))
    assert (found.p50, found.p90) == pytest.approx(np.quantile(waits, (0.5, 0.9)).tolist(), rel=0.1)
    assert found.p99 == pytest.approx(np.quantile(waits, 0.99), rel=0.3)
    assert tightened(told).pieces[-1] == (0.3, 1.0, 10)
    assert sum(count for _, _, count in tightened(told).pieces) == told.count
    evenly = Histogram(100, 100 * 0.14, [(0.0, 0.3, 100)])
    assert tightened(evenly) == evenly


def test_without_a_number_of_requests_in_a_step_its_tokens_tell(vllm_text):
    server = Server("http://a", 30.0)
    server.add(reading(vllm_text, 0.0))
    view = view_of([server], since_start=True)
    generated, steps = 28_002, 7_644
    assert view.batch_size == pytest.approx(generated / steps)
    assert view.latencies["queue"].p99 < 0.001  # all of them are in a bucket that ends at 0.3 s


def test_increases_and_latencies_are_those_between_the_readings(metrics):
    old, new = reading(metrics(10), 100.0), reading(metrics(30), 104.0)
    assert increase("prompt_tokens_total", old, new) == 20_000
    assert increase("prompt_tokens_total", None, new) == 30_000
    assert increase("no_such_total", old, new) is None
    found = latency(observed("time_to_first_token_seconds", old, new))
    assert found.count == 20
    assert (found.p50, found.p90, found.p99) == pytest.approx((0.005, 0.009, 0.0099))
    assert found.mean == pytest.approx(0.006)
    assert latency(observed("no_such", old, new)).p50 is None


def test_rates_are_per_second_and_shares_are_of_the_window(metrics):
    server = Server("http://a", 30.0)
    for time, requests in ((100.0, 10), (104.0, 30), (106.0, 35)):
        server.add(reading(metrics(requests), time))
    view = view_of([server])
    assert view.generation_rate == pytest.approx(5 * 500 / 2)  # between the last two
    assert view.mean_generation_rate == pytest.approx(25 * 500 / 6)
    assert view.prefix_hit_rate == pytest.approx(0.25)
    assert view.span == pytest.approx(6.0)
    assert view.recent_preemptions == 0
    assert view.preemptions == 7
    since_start = view_of([server], since_start=True)
    assert since_start.latencies["TTFT"].count == 35


def test_several_servers_are_added(metrics):
    servers = [Server(f"http://{name}", 30.0) for name in "abc"]
    for server, requests in zip(servers, (10, 20, 30), strict=True):
        server.add(reading(metrics(0), 0.0, server.url))
        server.add(reading(metrics(requests), 2.0, server.url))
    servers[2].add(Reading("http://c", 3.0, 0.0, error="gone"))  # what is away does not count
    view = view_of(servers)
    assert view.mean_generation_rate == pytest.approx((10 + 20) * 500 / 2)
    assert view.running == 24
    assert view.kv_usage == pytest.approx(0.432)
    assert view.latencies["TTFT"].count == 30
    assert charted(view, servers).points["running"][-1] == 24


def test_a_restart_of_the_server_forgets_what_was_before(metrics):
    server = Server("http://a", 30.0)
    for time, requests in ((0.0, 100), (1.0, 110), (2.0, 5)):
        server.add(reading(metrics(requests), time))
    assert view_of([server]).generation_rate is None
    server.add(reading(metrics(7), 3.0))
    view = view_of([server])
    assert view.generation_rate == pytest.approx(1000)
    assert view.latencies["TTFT"].count == 2
    assert list(server.points["generation"]) == [5000, None, 1000]


def test_a_server_that_began_anew_is_known_by_its_start_even_when_it_is_ahead(metrics):
    old, new = reading(metrics(10), 0.0), reading(metrics(20, start=1.75e9), 1.0)
    assert restarted(old, new)
    assert not restarted(old, reading(metrics(20), 1.0))


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.integers(0, 1000), min_size=2, max_size=12), away=st.sets(st.integers(0, 11))
)
def test_no_rate_is_ever_negative_whatever_the_counters_do(work, away):
    server = Server("http://a", 3.0)
    for second, requests in enumerate(work):
        if second in away:
            server.add(Reading("http://a", float(second), 0.0, error="away"))
            continue
        counters = {
            "generation_tokens_total": float(requests),
            "prompt_tokens_total": 2.0 * requests,
        }
        seen = {
            "time_to_first_token_seconds": Histogram(
                requests, requests, [(0.0, 1.0, requests)] * (requests > 0)
            )
        }
        server.add(Reading("http://a", float(second), 0.0, numbers=counters, histograms=seen))
    view = view_of([server])
    rates = [
        view.generation_rate,
        view.mean_generation_rate,
        view.mean_prompt_rate,
        *server.points["generation"],
    ]
    assert all(rate >= 0 for rate in rates if rate is not None)
    highest = max((b - a for a, b in pairwise(work)), default=0)
    assert all(
        point <= max(highest, 0) * len(work)
        for point in server.points["generation"]
        if point is not None
    )
    assert all(0 <= found.count <= 1000 for found in view.latencies.values())


def test_the_window_slides(metrics):
    server = Server("http://a", 10.0)
    for second in range(60):
        server.add(reading(metrics(second), float(second)))
    view = view_of([server])
    assert view.span == pytest.approx(10.0)
    assert view.latencies["TTFT"].count == 10
    assert len(charted(view, [server]).points["generation"]) == 59


def test_memory_is_bounded_by_the_window_and_the_width_of_a_screen(metrics):
    server = Server("http://a", 3600.0)
    first = reading(metrics(0), 0.0)
    for index in range(20_000):
        server.add(
            Reading(
                "http://a", 0.1 * index, 0.0, numbers=first.numbers, histograms=first.histograms
            )
        )
    assert len(server._kept) <= KEPT + 2
    assert max(len(points) for points in server.points.values()) == HISTORY


def test_bands_hold_what_falls_into_them():
    rng = np.random.default_rng(2)
    pieces = [(0.0, 0.001, 50), (0.02, 0.05, 400), (1.0, 1.01, 7), (600.0, 600.0, 3)]
    counts = np.zeros(NUM_BANDS)
    for low, high, count in pieces:
        drawn = rng.uniform(low, high, 2000 * count)
        counts += np.bincount([band_of(value) for value in drawn], minlength=NUM_BANDS) / 2000
    assert np.asarray(spread(pieces)) == pytest.approx(counts, abs=0.4)
    assert all(band_of(lower_bound(band) * 1.0001) == band for band in range(NUM_BANDS))


def test_together_keeps_all_that_was_seen():
    both = together([Histogram(2, 3.0, [(0, 1, 2)]), Histogram(1, 5.0, [(1, 5, 1)])])
    assert (both.count, both.sum, both.pieces) == (3, 8.0, [(0, 1, 2), (1, 5, 1)])
