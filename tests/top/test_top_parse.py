"""The parser against Prometheus' parser, on text of Prometheus' client."""

from __future__ import annotations

import math
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from toolkit.client.wire import ServerError
from toolkit.metrics import Metrics
from toolkit.top.readings.parse import HISTOGRAMS, RENAMED, Parser


def reference(text, prefix):
    """Sum all series by name without the prefix, with the general parser."""
    sums = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(prefix) and "le" not in sample.labels:
                sums[sample.name.removeprefix(prefix)] += sample.value
    return sums


def cumulative(text, name):
    """Return cumulative counts by bound, from the general parser."""
    counts = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{name}_bucket":
                counts[float(sample.labels["le"])] += sample.value
    return dict(sorted(counts.items()))


@pytest.mark.parametrize("prefix", ["tk", "vllm", "other"])
def test_parser_agrees_with_prometheus_on_tk_metrics(prefix):
    metrics = Metrics(prefix, 'a "model" \\ with } and {')
    for index in range(50):
        metrics.observe_prompt(1000 + index, 16 * index)
        metrics.time_to_first_token.observe(0.001 * 1.3**index)
        metrics.inter_token_latency.observe(0.01 / (index + 1), 7)
        metrics.count_finished("stop" if index % 3 else "length")
    text = metrics.expose().decode()
    found = Parser().parse(text)
    expected = reference(text, f"{prefix}:")
    numbers = dict(found.numbers)
    for name, histogram in found.histograms.items():
        numbers[f"{name}_count"], numbers[f"{name}_sum"] = histogram.count, histogram.sum
    for name in set(expected) - {"kv_cache_usage_perc"}:
        if not name.endswith("_created"):
            assert numbers[name] == pytest.approx(expected[name]), name
    assert found.model == 'a "model" \\ with } and {'
    ended = {"stop": 33, "length": 17, "abort": 0, "error": 0}
    assert found.parts["request_success_total"] == ended
    assert set(found.histograms) == HISTOGRAMS - set(RENAMED)
    for name in found.histograms:
        for bound, count in cumulative(text, f"{prefix}:{name}").items():
            if not math.isinf(bound):
                assert (
                    sum(
                        n
                        for above, up_to, n in found.histograms[name].buckets
                        if up_to <= bound and above < bound
                    )
                    == count
                )


@settings(max_examples=20, deadline=None)
@given(
    values=st.lists(
        st.tuples(st.text(max_size=8), st.floats(0, 1e12)),
        min_size=1,
        max_size=4,
        unique_by=lambda v: v[0],
    )
)
def test_labels_may_have_any_text(values):
    registry = CollectorRegistry()
    Gauge("tk:num_requests_running", "", registry=registry).set(1)
    ended = Counter("tk:request_success", "", ("finished_reason",), registry=registry)
    for reason, value in values:
        ended.labels(reason).inc(value)
    parser = Parser()
    for _ in range(2):  # the second time from the cache
        found = parser.parse(generate_latest(registry).decode())
        assert found.parts["request_success_total"] == pytest.approx(dict(values))


def test_engines_are_added_and_shares_averaged():
    text = "".join(
        f'p:num_requests_running{{engine="{engine}",model_name="m"}} {engine + 1}\n'
        f'p:kv_cache_usage_perc{{engine="{engine}",model_name="m"}} 0.{engine}\n'
        for engine in range(3)
    )
    found = Parser().parse(text)
    assert found.numbers["num_requests_running"] == 6
    assert found.numbers["kv_cache_usage_perc"] == pytest.approx(0.1)
    assert found.model == "m"


def test_values_above_the_last_bound_count_as_it():
    registry = CollectorRegistry()
    Gauge("tk:num_requests_running", "", registry=registry).set(0)
    histogram = Histogram(
        "tk:time_to_first_token_seconds", "", buckets=(1.0, 2.0), registry=registry
    )
    for value in (0.5, 1.5, 1.6, 99.0):
        histogram.observe(value)
    found = (
        Parser().parse(generate_latest(registry).decode()).histograms["time_to_first_token_seconds"]
    )
    assert found.buckets == [(0.0, 1.0, 1.0), (1.0, 2.0, 2.0), (2.0, 2.0, 1.0)]
    assert found.count == 4
    assert found.sum == pytest.approx(102.6)


def test_names_of_older_vllm_are_known():
    text = "vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.25\n"
    assert Parser().parse(text).numbers["kv_cache_usage_perc"] == 0.25
    text += "vllm:kv_cache_usage_perc 0.5\n"  # a version with both
    assert Parser().parse(text).numbers["kv_cache_usage_perc"] == 0.5
    text += 'vllm:time_per_output_token_seconds_bucket{le="0.1"} 3\n'
    text += "vllm:time_per_output_token_seconds_count 3\n"
    assert Parser().parse(text).histograms["inter_token_latency_seconds"].count == 3


def test_nan_and_foreign_metrics_are_left_out():
    text = """vllm:num_requests_running 1
vllm:spec_decode_draft_acceptance_rate NaN
vllm:e2e_request_latency_seconds_bucket{le="1.0"} 4
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 5
vllm:cache_config_info{block_size="16",note="a \\"quoted\\" value"} 1.0
python_gc_objects_collected_total{generation="0"} 1234.0
process_cpu_seconds_total 12.5
"""
    found = Parser().parse(text)
    assert "spec_decode_draft_acceptance_rate" not in found.numbers
    assert "python_gc_objects_collected_total" not in found.numbers
    assert found.numbers["process_cpu_seconds_total"] == 12.5
    assert found.histograms["e2e_request_latency_seconds"].count == 5
    assert found.labels == {"block_size": "16", "note": 'a "quoted" value'}


@pytest.mark.parametrize(
    "text",
    [
        "<html>hello</html>",
        "",
        "# TYPE other gauge\nother 1\n",
        'a{b="c} 1',
        "tk:num_requests_running one\n",
    ],
)
def test_text_of_something_else_is_a_readable_error(text):
    with pytest.raises(ServerError, match="/metrics"):
        Parser().parse(text)


def test_parser_agrees_with_prometheus_on_vllm_metrics(vllm_text):
    found, expected = Parser().parse(vllm_text), reference(vllm_text, "vllm:")
    means = {"cache_config_info", "kv_cache_usage_perc"}
    assert {
        name: found.numbers[name] for name in expected.keys() & found.numbers.keys() - means
    } == {
        name: pytest.approx(expected[name])
        for name in expected.keys() & found.numbers.keys() - means
    }
    assert {"prompt_tokens_total", "num_requests_running"} < found.numbers.keys()
    for name, histogram in found.histograms.items():
        assert histogram.count == expected[f"{name}_count"]
        assert sum(count for _, _, count in histogram.buckets) == histogram.count
    assert found.model == "demo"
    assert found.labels["num_gpu_blocks"] == "1024"
    assert found.parts["process_cpu_seconds_total"] == {
        "server": found.numbers["process_cpu_seconds_total"]
    }
