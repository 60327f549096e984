"""/metrics, compared with known traffic."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.api.conftest import CONTEXT
from tests.server import WAIT, Server, until

PROMPT = "This prompt is only for the metrics, and has its own first block."
GREEDY = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def change(server: Server) -> Callable[..., Callable[[], float]]:
    """`change(name, **labels)` returns a function: the growth of a metric since then."""
    until(server.is_idle)

    def since(name: str, **labels: str) -> Callable[[], float]:
        before = server.metric(name, **labels)
        return lambda: server.metric(name, **labels) - before

    return since


def test_tokens_are_counted_as_in_usage(server: Server, change: Callable) -> None:
    prompt, generated = change("tk:prompt_tokens_total"), change("tk:generation_tokens_total")
    first, between = (
        change("tk:time_to_first_token_seconds_count"),
        change("tk:inter_token_latency_seconds_count"),
    )
    usages = [
        server.http.post("/v1/completions", json=GREEDY | extra).json()["usage"]
        for extra in (
            {"max_tokens": 9},
            {"max_tokens": 5, "n": 2},
            {"prompt": ["x", "yz"], "max_tokens": 3},
            {"prompt": "abcd", "max_tokens": 0, "echo": True},
        )
    ]
    assert prompt() == sum(u["prompt_tokens"] for u in usages) == 2 * len(PROMPT) + 3 + 4
    assert generated() == sum(u["completion_tokens"] for u in usages) == 9 + 10 + 6
    assert first() == 5  # of each prompt
    assert between() == 8 + 4 + 4 + 2 + 2


def test_finished_requests_are_counted_by_reason(server: Server, change: Callable) -> None:
    counts = {
        r: change("tk:request_success_total", finished_reason=r)
        for r in ("stop", "length", "abort", "error")
    }
    latencies = change("tk:e2e_request_latency_seconds_count")
    server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 2})
    server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 2, "n": 2})
    server.http.post(
        "/v1/completions",
        json=GREEDY | {"max_tokens": 2, "ignore_eos": False, "logit_bias": {"256": 100}},
    )
    endless = GREEDY | {"max_tokens": 8000, "stream": True}
    with server.slowly(), server.http.stream("POST", "/v1/completions", json=endless) as answer:
        next(answer.iter_raw())
    until(server.is_idle)
    assert {reason: count() for reason, count in counts.items()} == {
        "stop": 1,
        "length": 2,  # a request with two answers is one
        "abort": 1,
        "error": 0,
    }
    assert latencies() == 3


def test_a_refused_request_counts_no_tokens(server: Server, change: Callable) -> None:
    changes = [
        change(f"tk:{name}")
        for name in ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
    ]
    refused = change("http_requests_total", status="4xx", handler="/v1/completions")
    assert server.http.post("/v1/completions", json={"prompt": "x" * CONTEXT}).status_code == 400
    assert [c() for c in changes] == [0, 0, 0]
    until(lambda: refused() == 1)  # counted after its response was sent


def test_prefix_hits_are_the_cached_tokens_of_usage(server: Server, change: Callable) -> None:
    prompt = "Asked three times, and computed once. " * 5
    queries, hits = change("tk:prefix_cache_queries_total"), change("tk:prefix_cache_hits_total")
    cached = change("tk:prompt_tokens_cached_total")
    usages = [
        server.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()[
            "usage"
        ]
        for _ in range(3)
    ]
    reported = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    assert reported >= 2 * (len(prompt) - 32)
    assert hits() == cached() == reported
    assert queries() == 3 * len(prompt)


def test_gauges_show_running_requests(server: Server) -> None:
    """1280 tokens use 80 of 4096 blocks."""
    body = {"prompt": [3] * 1280, "max_tokens": 6000, "ignore_eos": True, "stream": True}
    with server.slowly(), server.http.stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_raw()
        next(chunks)
        with httpx.Client(base_url=server.url, timeout=WAIT) as other:
            assert other.get("/health").status_code == 200
        assert server.metric("tk:num_requests_running") == 1
        assert 80 / 4096 <= server.metric("tk:kv_cache_usage_perc") < 0.2
    until(server.is_idle)


def test_lengths_and_settings_of_requests_are_observed(server: Server, change: Callable) -> None:
    names = [
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
    ]
    sums = [change(f"tk:{name}_sum") for name in names]
    server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 7, "n": 3})
    assert [s() for s in sums] == [len(PROMPT), 21, 3, 7]


def test_every_step_s_tokens_are_observed(server: Server, change: Callable) -> None:
    steps, tokens = (
        change("tk:iteration_tokens_total_count"),
        change("tk:iteration_tokens_total_sum"),
    )
    server.http.post(
        "/v1/completions", json={"prompt": [5, 4, 3, 2, 1] * 7, "max_tokens": 4, "ignore_eos": True}
    )
    assert (steps(), tokens()) == (4, 35 + 3)


def test_the_phases_of_a_request_sum_to_its_latency(server: Server, change: Callable) -> None:
    phases = [change(f"tk:request_{p}_time_seconds_sum") for p in ("queue", "prefill", "decode")]
    latency = change("tk:e2e_request_latency_seconds_sum")
    server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 30})
    assert sum(p() for p in phases) == pytest.approx(latency(), rel=1e-6)
    assert all(p() >= 0 for p in phases)


def test_the_format_is_prometheus(server: Server) -> None:
    server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 2})
    until(server.is_idle)
    answer = server.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert '{engine="0",model_name="tiny"}' in answer.text
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    for name, kind, suffix in (
        ("tk:num_requests_running", "gauge", ""),
        ("tk:generation_tokens", "counter", "_total"),
        ("tk:e2e_request_latency_seconds", "histogram", "_sum"),
    ):
        assert families[name].type == kind
        values = [one.value for one in families[name].samples if one.name == name + suffix]
        assert values == [server.metric(name + suffix)]  # which reads the registry


def test_the_prefix_can_be_changed(base: Server) -> None:
    assert base.metric("vllm:num_requests_running") == 0
    assert "vllm:num_requests_running" in base.http.get("/metrics").text


def test_steps_are_estimated_and_polling_loses_no_counts(server: Server, change: Callable) -> None:
    work = [
        change(f"tk:estimated_{what}_per_gpu_total")
        for what in ("flops", "read_bytes", "write_bytes")
    ]
    queries, tokens = change("tk:prefix_cache_queries_total"), change("tk:prompt_tokens_total")
    for _ in range(3):
        server.http.post("/v1/completions", json=GREEDY | {"max_tokens": 4})
        server.http.get("/load")
    assert queries() == tokens() == 3 * len(PROMPT)
    operations, read, written = (grown() for grown in work)
    assert operations > 0
    assert read > written > 0
