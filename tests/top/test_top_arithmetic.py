"""Arithmetic on readings: rates, quantiles, windows, restarts."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.top.drawing.bands import NUM_BANDS, band_of, count_by_band, lower_bound
from toolkit.top.readings.arithmetic import (
    add_up,
    counter_increase,
    has_restarted,
    histogram_increase,
    quantiles,
    refine_first_bucket,
    summarize,
)
from toolkit.top.readings.parse import Parser
from toolkit.top.readings.reading import Histogram, Reading
from toolkit.top.readings.server import HISTORY, MAX_READINGS, Server
from toolkit.top.view import view_of, with_charts


def reading(text, time, url="http://a"):
    """Make a reading from Prometheus text."""
    found = Parser().parse(text)
    return Reading(
        url,
        time,
        1.8e9 + time,
        numbers=found.numbers,
        parts=found.parts,
        histograms=found.histograms,
        labels=found.labels,
        model=found.model,
    )


def prometheus(buckets, q):
    """`histogram_quantile` by its documentation.

    `buckets`: cumulative counts by ascending bound, the last one +Inf.
    """
    bounds, counts = list(buckets), list(buckets.values())
    wanted = q * counts[-1]
    index = next(i for i, count in enumerate(counts) if count >= wanted)
    if math.isinf(bounds[index]):
        return bounds[index - 1]
    lower, before = (0.0, 0.0) if index == 0 else (bounds[index - 1], counts[index - 1])
    return lower + (bounds[index] - lower) * (wanted - before) / (counts[index] - before)


def to_buckets(cumulative):
    buckets, lower, below = [], 0.0, 0.0
    for bound, count in cumulative.items():
        upper = lower if math.isinf(bound) else bound
        if count > below:
            buckets.append((lower, upper, count - below))
        lower, below = upper, count
    return buckets


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ({1.0: 10, math.inf: 10}, 0.5, 0.5),  # spread evenly from 0
        ({1.0: 0, 2.0: 10, math.inf: 10}, 0.5, 1.5),
        ({1.0: 50, 2.0: 90, 4.0: 100, math.inf: 100}, 0.9, 2.0),
        ({1.0: 50, 2.0: 90, 4.0: 100, math.inf: 100}, 0.99, 3.8),
        ({1.0: 50, 2.0: 50, 4.0: 100, math.inf: 100}, 0.75, 3.0),  # an empty bucket in between
        ({1.0: 5, math.inf: 10}, 0.99, 1.0),  # values above the last bound count as that bound
        ({1.0: 0, math.inf: 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles_interpolate_within_a_bucket(buckets, q, expected):
    assert quantiles(to_buckets(buckets), (q,)) == [
        None if expected is None else pytest.approx(expected)
    ]


@settings(max_examples=200, deadline=None)
@given(
    counts=st.lists(st.integers(0, 50), min_size=2, max_size=12).filter(any), q=st.floats(0.01, 1.0)
)
def test_quantiles_of_one_histogram_equal_prometheus(counts, q):
    bounds = [0.001 * 1.5**i for i in range(len(counts) - 1)] + [math.inf]
    cumulative = dict(zip(bounds, np.cumsum(counts).tolist(), strict=True))
    assert quantiles(to_buckets(cumulative), (q,))[0] == pytest.approx(
        prometheus(cumulative, q), rel=1e-6, abs=1e-9
    )


def test_quantiles_combine_servers_with_different_bounds():
    rng = np.random.default_rng(1)
    buckets = [(0.0, 0.3, 300), (0.3, 1.0, 500), (0.1, 0.5, 900), (0.5, 4.0, 100), (4.0, 4.0, 20)]
    drawn = np.concatenate([rng.uniform(low, high, 400 * count) for low, high, count in buckets])
    wanted = (0.1, 0.5, 0.9, 0.99)
    assert quantiles(buckets, wanted) == pytest.approx(
        np.quantile(drawn, wanted).tolist(), rel=0.01
    )


def test_first_bucket_is_refined_by_the_sum():
    waits = np.random.default_rng(3).exponential(0.004, 20_000)
    # The first bounds of vLLM's histogram of the queue time.
    buckets = {0.3: len(waits), 1.0: len(waits) + 10, math.inf: len(waits) + 10}
    coarse = Histogram(len(waits) + 10, waits.sum() + 10 * 0.301, to_buckets(buckets))
    refined = refine_first_bucket(coarse)
    found = summarize(refined)
    assert (found.p50, found.p90) == pytest.approx(np.quantile(waits, (0.5, 0.9)).tolist(), rel=0.1)
    assert found.p99 == pytest.approx(np.quantile(waits, 0.99), rel=0.3)
    assert refined.buckets[-1] == (0.3, 1.0, 10)
    assert sum(count for _, _, count in refined.buckets) == coarse.count
    evenly = Histogram(100, 100 * 0.14, [(0.0, 0.3, 100)])
    assert refine_first_bucket(evenly) == evenly


def test_batch_size_without_its_histogram_comes_from_tokens(vllm_text):
    server = Server("http://a", 30.0)
    server.add(reading(vllm_text, 0.0))
    view = view_of([server], since_start=True)
    generated, steps = 28_002, 7_644
    assert view.batch_size == pytest.approx(generated / steps)
    assert view.latencies["queue"].p99 < 0.001  # all are in a bucket up to 0.3 s


def test_increases_and_latencies_are_between_two_readings(metrics):
    old, new = reading(metrics(10), 100.0), reading(metrics(30), 104.0)
    assert counter_increase("prompt_tokens_total", old, new) == 20_000
    assert counter_increase("prompt_tokens_total", None, new) == 30_000
    assert counter_increase("no_such_total", old, new) is None
    found = summarize(histogram_increase("time_to_first_token_seconds", old, new))
    assert found.count == 20
    assert (found.p50, found.p90, found.p99) == pytest.approx((0.005, 0.009, 0.0099))
    assert found.mean == pytest.approx(0.006)
    assert summarize(histogram_increase("no_such", old, new)).p50 is None


def test_rates_are_per_second_and_means_over_the_window(metrics):
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


def test_view_adds_several_servers(metrics):
    servers = [Server(f"http://{name}", 30.0) for name in "abc"]
    for server, requests in zip(servers, (10, 20, 30), strict=True):
        server.add(reading(metrics(0), 0.0, server.url))
        server.add(reading(metrics(requests), 2.0, server.url))
    servers[2].add(
        Reading("http://c", 3.0, 0.0, error="gone")
    )  # a server that does not answer is left out
    view = view_of(servers)
    assert view.mean_generation_rate == pytest.approx((10 + 20) * 500 / 2)
    assert view.running == 24
    assert view.kv_usage == pytest.approx(0.432)
    assert view.latencies["TTFT"].count == 30
    assert with_charts(view, servers).points["running"][-1] == 24


def test_restart_drops_the_readings_before_it(metrics):
    server = Server("http://a", 30.0)
    for time, requests in ((0.0, 100), (1.0, 110), (2.0, 5)):
        server.add(reading(metrics(requests), time))
    assert view_of([server]).generation_rate is None
    server.add(reading(metrics(7), 3.0))
    view = view_of([server])
    assert view.generation_rate == pytest.approx(1000)
    assert view.latencies["TTFT"].count == 2
    assert list(server.points["generation"]) == [5000, None, 1000]


def test_restart_is_detected_by_the_start_time(metrics):
    old, new = reading(metrics(10), 0.0), reading(metrics(20, start=1.75e9), 1.0)
    assert has_restarted(old, new)
    assert not has_restarted(old, reading(metrics(20), 1.0))


@settings(max_examples=60, deadline=None)
@given(
    work=st.lists(st.integers(0, 1000), min_size=2, max_size=12), away=st.sets(st.integers(0, 11))
)
def test_no_rate_is_negative(work, away):
    server = Server("http://a", 3.0)
    for second, requests in enumerate(work):
        if second in away:
            server.add(Reading("http://a", float(second), 0.0, error="away"))
            continue
        counters = {
            "generation_tokens_total": float(requests),
            "prompt_tokens_total": 2.0 * requests,
        }
        histograms = {
            "time_to_first_token_seconds": Histogram(
                requests, requests, [(0.0, 1.0, requests)] * (requests > 0)
            )
        }
        server.add(Reading("http://a", float(second), 0.0, numbers=counters, histograms=histograms))
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


def test_window_slides(metrics):
    server = Server("http://a", 10.0)
    for second in range(60):
        server.add(reading(metrics(second), float(second)))
    view = view_of([server])
    assert view.span == pytest.approx(10.0)
    assert view.latencies["TTFT"].count == 10
    assert len(with_charts(view, [server]).points["generation"]) == 59


def test_memory_of_a_server_is_bounded(metrics):
    server = Server("http://a", 3600.0)
    first = reading(metrics(0), 0.0)
    for index in range(20_000):
        server.add(
            Reading(
                "http://a", 0.1 * index, 0.0, numbers=first.numbers, histograms=first.histograms
            )
        )
    assert len(server._readings) <= MAX_READINGS + 2
    assert max(len(points) for points in server.points.values()) == HISTORY


def test_bands_count_observations_by_time():
    rng = np.random.default_rng(2)
    buckets = [(0.0, 0.001, 50), (0.02, 0.05, 400), (1.0, 1.01, 7), (600.0, 600.0, 3)]
    counts = np.zeros(NUM_BANDS)
    for low, high, count in buckets:
        drawn = rng.uniform(low, high, 2000 * count)
        counts += np.bincount([band_of(value) for value in drawn], minlength=NUM_BANDS) / 2000
    assert np.asarray(count_by_band(buckets)) == pytest.approx(counts, abs=0.4)
    assert all(band_of(lower_bound(band) * 1.0001) == band for band in range(NUM_BANDS))


def test_adding_histograms_keeps_all_observations():
    both = add_up([Histogram(2, 3.0, [(0, 1, 2)]), Histogram(1, 5.0, [(1, 5, 1)])])
    assert (both.count, both.sum, both.buckets) == (3, 8.0, [(0, 1, 2), (1, 5, 1)])
