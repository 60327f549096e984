from __future__ import annotations

import math
import re

import pytest

from toolkit.bench.wire import ServerError
from toolkit.top.arithmetic import increase, latency, quantile, rate, restarted, share
from toolkit.top.history import History
from toolkit.top.scrape import parse

INF = math.inf


@pytest.mark.parametrize(
    ("buckets", "q", "expected"),
    [
        ({1.0: 10, INF: 10}, 0.5, 0.5),  # evenly spread from 0
        ({1.0: 0, 2.0: 10, INF: 10}, 0.5, 1.5),
        ({1.0: 50, 2.0: 90, 4.0: 100, INF: 100}, 0.9, 2.0),
        ({1.0: 50, 2.0: 90, 4.0: 100, INF: 100}, 0.99, 3.8),
        ({1.0: 50, 2.0: 50, 4.0: 100, INF: 100}, 0.75, 3.0),  # an empty bucket in between
        ({1.0: 5, INF: 10}, 0.99, 1.0),  # beyond the last bound: that bound
        ({1.0: 0, INF: 0}, 0.5, None),
        ({}, 0.5, None),
    ],
)
def test_quantiles_interpolate_within_a_bucket(buckets, q, expected):
    assert quantile(buckets, q) == (None if expected is None else pytest.approx(expected))


def test_rates_are_increases_over_the_time_between(metrics):
    old, new = parse(metrics(10), time=100.0), parse(metrics(30), time=104.0)
    assert rate("generation_tokens_total", old, new) == pytest.approx(20 * 500 / 4)
    assert increase("prompt_tokens_total", old, new) == pytest.approx(20_000)
    assert increase("prompt_tokens_total", None, new) == pytest.approx(30_000)
    assert share("prefix_cache_hits_total", "prefix_cache_queries_total", old, new) == pytest.approx(0.25)


def test_what_the_server_does_not_have_is_none(metrics):
    old, new = parse(metrics(10), time=0.0), parse(metrics(10), time=1.0)
    assert rate("no_such_total", old, new) is None
    assert (
        share("prefix_cache_hits_total", "prefix_cache_queries_total", old, new) is None
    )  # nothing was asked


def test_latencies_are_those_between_the_readings():
    head = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 0\n# TYPE vllm:x histogram\n"
    lines = 'vllm:x_bucket{{le="1.0"}} {}\nvllm:x_bucket{{le="2.0"}} {}\nvllm:x_bucket{{le="+Inf"}} {}\n'
    lines += "vllm:x_sum {}\nvllm:x_count {}\n"
    old = parse(head + lines.format(100, 100, 100, 50.0, 100), time=0.0)
    new = parse(head + lines.format(100, 110, 110, 65.0, 110), time=1.0)
    found = latency("x", old, new)
    assert (found.p50, found.mean, found.count) == (pytest.approx(1.5), pytest.approx(1.5), 10)
    assert latency("x", None, new).count == 110


def test_several_engines_are_added_and_the_prefix_is_found():
    text = "# TYPE p:num_requests_running gauge\n" + "".join(
        f'p:num_requests_running{{engine="{engine}",model_name="m"}} {engine + 1}\n' for engine in range(3)
    )
    scrape = parse(text, time=0.0)
    assert scrape.total("num_requests_running") == 6
    assert scrape.mean("num_requests_running") == 2
    assert scrape.model == "m"


def test_without_a_start_time_the_birth_of_the_counters_is_taken(metrics):
    assert parse(metrics(1), time=0.0).start_time == 1.7e9
    text = re.sub("process_start_time_seconds", "something_else", metrics(1))
    assert parse(text, time=0.0).start_time is None
    text += "# TYPE tk:generation_tokens_created gauge\ntk:generation_tokens_created 1.6e+09\n"
    assert parse(text, time=0.0).start_time == 1.6e9


@pytest.mark.parametrize("text", ["<html>hello</html>", "", "# TYPE other gauge\nother 1\n", 'a{b="c} 1'])
def test_metrics_of_something_else_are_a_readable_error(text):
    with pytest.raises(ServerError, match="/metrics"):
        parse(text, time=0.0)


def test_a_restart_of_the_server_forgets_what_was_before(metrics):
    history = History(window=30.0)
    history.add(parse(metrics(100), time=0.0))
    history.add(parse(metrics(110), time=1.0))
    assert restarted(history.scrapes[-1], parse(metrics(5), time=2.0))
    history.add(parse(metrics(5), time=2.0))
    assert history.view().generation_rate is None
    history.add(parse(metrics(7), time=3.0))
    assert history.view().generation_rate == pytest.approx(1000)


def test_the_window_slides(metrics):
    history = History(window=10.0)
    for second in range(60):
        history.add(parse(metrics(second), time=float(second)))
    view = history.view()
    assert view.span == pytest.approx(10.0)
    assert view.latencies["TTFT"].count == 10
    assert history.view(since_start=True).latencies["TTFT"].count == 59
    assert len(view.generation_history) == 59
