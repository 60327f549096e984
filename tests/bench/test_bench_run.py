"""Complete runs against a server with known delays. Times are checked only from below, because the
test machine may be busy.
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import os
import signal

import orjson
import pytest
from rich.console import Console

from tests.bench.results import outcome
from toolkit.bench.report.document import as_json, request_lines
from toolkit.bench.report.table import print_table
from toolkit.bench.run import measure
from toolkit.client.wire import ServerError
from toolkit.config.load import BenchConfig
from toolkit.errors import ConfigError


def config(server, **settings):
    return BenchConfig(
        **{"url": server.url, "random_input_len": 8, "random_output_len": 4} | settings
    )


async def test_counts_and_times_match_the_server(server):
    server.delay, server.gap = 0.2, 0.02
    outcome = await measure(config(server, request_rate=50.0, num_prompts=20))
    result = outcome.result
    assert outcome.model == "fake"
    assert (result.num_sent, result.num_succeeded, result.num_failed) == (20, 20, 0)
    assert (result.prompt_tokens, result.output_tokens) == (20 * 8, 20 * 4)
    found = result.latencies
    assert 0.2 <= found.service_ttft.at(50) < 60.0
    assert found.ttft.at(50) >= found.service_ttft.at(50)
    assert 0.01 <= found.itl.mean.value < 60.0
    assert found.itl.count == 20 * 3
    assert result.has_token_counts
    assert found.tpot.mean.value == pytest.approx(found.itl.mean.value)
    assert found.service_e2el.at(50) >= 0.2 + 3 * 0.02


async def test_load_is_open_loop(server):
    """All requests are sent even if the server answers none before the last has arrived."""
    server.hold = 30
    async with asyncio.timeout(60):
        outcome = await measure(config(server, request_rate=100.0, num_prompts=30, seed=5))
    assert outcome.result.max_in_flight == 30


async def test_waiting_for_max_concurrency_counts_from_the_schedule(server):
    server.delay = 0.2
    result = (
        await measure(config(server, request_rate=1000.0, num_prompts=4, max_concurrency=1))
    ).result
    assert result.max_in_flight == 1
    assert result.latencies.ttft.max >= 0.75
    assert result.latencies.service_ttft.at(50) < result.latencies.ttft.max
    assert result.place_wait.max >= 0.55


async def test_without_a_rate_each_answer_starts_the_next_request(server):
    server.delay = 0.05
    result = (await measure(config(server, max_concurrency=3, num_prompts=12))).result
    assert (result.num_succeeded, result.max_in_flight) == (12, 3)
    assert result.wall >= 4 * 0.05


async def test_duration_ends_the_sending_not_the_answers(server):
    server.delay = 0.3
    result = (await measure(config(server, max_concurrency=2, duration=0.5))).result
    assert result.num_succeeded == result.num_sent
    # The second pair is sent at 0.3 s, unless the machine is very busy.
    assert 2 <= result.num_sent <= 4
    assert result.num_unfinished == 0


async def test_gap_is_spread_over_the_tokens_of_its_chunk(server):
    server.gap, server.tokens_per_chunk, server.running_usage = 0.1, 4, True
    result = (await measure(config(server, num_prompts=3, random_output_len=12))).result
    assert result.has_token_counts
    found = result.latencies
    assert (found.itl.count, found.chunk_gap.count) == (3 * 8, 3 * 2)
    assert found.itl.mean.value == pytest.approx(found.chunk_gap.mean.value / 4)
    assert found.chunk_gap.max >= 0.09


async def test_chunks_of_unknown_size_are_reported(server):
    server.gap, server.tokens_per_chunk = 0.1, 4
    settings = config(server, num_prompts=3, random_output_len=12)
    outcome = await measure(settings)
    found = outcome.result.latencies
    assert not outcome.result.has_token_counts
    assert outcome.result.output_tokens == 36
    assert found.itl.mean.value == pytest.approx(found.chunk_gap.mean.value / 4)
    assert "chunk gap" in table(outcome)
    assert "Events carried 4.00 tokens on average" in table(outcome)


async def test_without_usage_chunks_count_as_tokens(server):
    server.tokens_per_chunk, server.final_usage = 2, False
    outcome = await measure(config(server, num_prompts=3, random_output_len=12))
    assert outcome.result.output_tokens == 3 * 6
    assert not outcome.result.has_token_counts
    assert "Each chunk counts as one token" in table(outcome)
    assert "shorter than requested" not in table(outcome)


async def test_failures_are_grouped_with_an_example(server):
    server.refuse_every, server.truncate_every = 2, 3
    settings = config(server, num_prompts=12, max_concurrency=1)
    outcome = await measure(settings)
    groups = {group.cause: group for group in outcome.result.errors}
    assert groups["HTTP 503"].count == 6
    assert groups["HTTP 503"].example == "The queue is full."
    assert groups["incomplete answer"].count == 2
    assert outcome.result.num_succeeded == 4
    assert "6 x HTTP 503: The queue is full." in table(outcome)


async def test_chat_route_and_warm_ups(server):
    result = (await measure(config(server, endpoint="chat", num_prompts=5, num_warmups=3))).result
    assert result.num_succeeded == 5
    assert len(server.bodies) == 8
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 8


async def test_ctrl_c_still_reports(server):
    server.hold = 4  # more than are sent, so that none is answered
    outcome, _ = await asyncio.gather(measure(config(server, num_prompts=3)), interrupt(server, 3))
    assert outcome.interrupted
    assert outcome.exit_code == 130
    assert outcome.result.num_unfinished == 3


async def test_missing_server_is_an_error(unused_tcp_port):
    with pytest.raises(
        ServerError, match=f"No server answers at http://127.0.0.1:{unused_tcp_port}"
    ):
        await measure(BenchConfig(url=f"127.0.0.1:{unused_tcp_port}"))


async def test_exit_code_is_1_if_every_request_is_refused(server):
    server.refuse_every = 1
    assert (await measure(config(server, num_prompts=3))).exit_code == 1
    with pytest.raises(ServerError, match="The queue is full"):
        await measure(config(server, num_prompts=3, num_warmups=2))


async def test_json_is_versioned_complete_and_without_secrets(server):
    settings = config(
        server,
        num_prompts=3,
        api_key="secret",
        header=("X-Team=hidden",),
        metadata=("gpu=H200", "note=a=b"),
    )
    outcome = await measure(settings)
    text = orjson.dumps(as_json(outcome))
    document = orjson.loads(text)
    assert document["schema"] == "tk-bench/2"
    assert document["requests"]["succeeded"] == 3
    assert document["tokens"]["prompt"] == 24
    assert document["tokens"]["output"] == document["tokens"]["output_asked"] == 12
    assert {"mean", "p50", "p50_ci", "p90", "p99", "max", "count"} <= set(document["ttft_s"])
    assert document["metadata"] == {"gpu": "H200", "note": "a=b"}
    assert {"tk", "python", "processor", "cores"} <= set(document["environment"])
    assert document["settings"]["seed"] == outcome.config.seed is not None
    assert b"secret" not in text
    assert b"hidden" not in text


def test_json_has_the_fields_of_vllm():
    """Latencies count from sending, which `outcome` does a millisecond late."""
    given = outcome(seconds=5.0, goodput=("ttft:1000",), metric_percentiles="90,99.5")
    found = as_json(given)
    assert found["completed"] == found["num_prompts"] == 100
    assert found["total_token_throughput"] == pytest.approx(100 * (128 + 21) / found["duration"])
    assert found["request_goodput"] == found["request_throughput"]
    assert found["request_rate"] == 20.0
    for name in ("ttft", "e2el"):
        for field in ("mean", "p90", "p99.5"):
            seconds = found[f"service_{name}_s"][field]
            assert found[f"{field}_{name}_ms"] == pytest.approx(seconds * 1e3)
    for name in ("tpot", "itl"):
        assert found[f"median_{name}_ms"] == pytest.approx(10, rel=0.1)
        assert found[f"std_{name}_ms"] == pytest.approx(found[f"{name}_s"]["std"] * 1e3)


async def test_key_and_headers_are_sent_with_every_request(server):
    await measure(
        config(server, num_prompts=2, api_key="secret", header=("X-Team=blue", "X-Odd=a=b"))
    )
    for headers in server.headers:
        assert headers["Authorization"] == "Bearer secret"
        assert (headers["X-Team"], headers["X-Odd"]) == ("blue", "a=b")


async def test_each_request_is_a_line_with_its_times(server):
    server.delay, server.gap, server.refuse_every = 0.05, 0.01, 3
    outcome = await measure(config(server, request_rate=100.0, num_prompts=6))
    rows = [orjson.loads(line) for line in request_lines(outcome)]
    assert [row["number"] for row in rows] == list(range(6))
    assert sum(row["error"] is not None for row in rows) == 2
    for row in rows:
        assert row["sent_s"] >= row["scheduled_s"]
        if row["error"] is None:
            assert row["ttft_s"] == pytest.approx(row["first_token_s"] - row["scheduled_s"])
            span = row["last_token_s"] - row["first_token_s"]
            assert sum(row["chunk_gaps_s"]) == pytest.approx(span, abs=1e-6)
            assert (row["output_tokens"], row["chunk_tokens"]) == (4, [1, 1, 1])


async def test_server_counters_are_compared(server):
    def page(queries, hits, preemptions, running):
        return (
            "# TYPE vllm:prefix_cache_queries counter\n"
            f'vllm:prefix_cache_queries_total{{engine="0"}} {queries / 2}\n'
            f'vllm:prefix_cache_queries_total{{engine="1"}} {queries / 2}\n'
            "# TYPE vllm:prefix_cache_hits counter\n"
            f"vllm:prefix_cache_hits_total {hits}\n"
            f"# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total {preemptions}\n"
            "# TYPE vllm:spec_decode_num_draft_tokens counter\n"
            f"vllm:spec_decode_num_draft_tokens_total {queries}\n"
            "# TYPE vllm:spec_decode_num_accepted_tokens counter\n"
            f"vllm:spec_decode_num_accepted_tokens_total {queries * 0.75}\n"
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running {running}\n"
            "# TYPE vllm:request_queue_time_seconds histogram\n"
            f'vllm:request_queue_time_seconds_bucket{{le="+Inf"}} {queries}\n'
            f"vllm:request_queue_time_seconds_sum {queries * 0.002}\n"
            f"vllm:request_queue_time_seconds_count {queries}\n"
        )

    server.metrics_pages = [page(1000, 100, 5, 3), page(3000, 600, 9, 0)]
    outcome = await measure(config(server, num_prompts=3))
    found = as_json(outcome)["server_metrics"]
    assert found["prefix_hit_ratio"] == pytest.approx(500 / 2000)
    assert found["preemptions"] == 4
    assert found["draft_acceptance"] == pytest.approx(0.75)
    assert found["queue_s"] == pytest.approx(0.002)
    shown = table(outcome)
    assert "25% of prompt tokens cached, 4 preemptions, 75% of draft tokens right" in shown
    assert "had other requests when the run began" in shown


async def test_counters_of_a_restarted_server_are_ignored(server):
    server.metrics_pages = ["x:num_preemptions_total 9\n", "x:num_preemptions_total 2\n"]
    outcome = await measure(config(server, num_prompts=3))
    assert outcome.server.increase("num_preemptions") is None


def test_table_fits_80_columns_and_shows_the_chosen_metrics():
    one = outcome(
        ttft=0.05, goodput=("ttft:200", "tpot:50"), percentile_metrics="ttft,itl", max_concurrency=9
    )
    shown = table(one)
    assert max(map(len, shown.splitlines())) <= 80
    assert len(shown.splitlines()) <= 22
    for name in (
        "TTFT",
        "from send",
        "ITL",
        "p99",
        "600 succeeded, 0 failed",
        "100.0% met ttft:200 tpot:50 ms",
    ):
        assert name in shown
    assert "E2E" not in shown


def test_service_times_are_hidden_if_they_hardly_differ():
    assert "from send" not in table(outcome(ttft=1.0))  # they differ by a thousandth


async def test_many_percentiles_are_rows(server):
    shown = table(
        await measure(config(server, num_prompts=3, metric_percentiles="1,25,50,75,99,99.9"))
    )
    assert [line.split()[0] for line in shown.splitlines()[-8:]] == [
        "mean",
        *["p1", "p25", "p50", "p75", "p99", "p99.9", "max"],
    ]


async def test_saturated_client_omits_throughput_and_latencies(server):
    outcome = await measure(config(server, num_prompts=3))
    late = saturated(outcome, "it was late")
    assert (unsaturated(outcome).exit_code, late.exit_code) == (0, 1)
    assert "TTFT" not in printed(late)
    assert "throughput" not in printed(late)
    assert "CLIENT SATURATED: it was late" in printed(late)


async def test_starting_server_is_waited_for(server, unused_tcp_port):
    settings = config(
        server, url=f"127.0.0.1:{unused_tcp_port}", ready_check_timeout_sec=90.0, num_prompts=1
    )

    async def later():
        await asyncio.sleep(0.2)
        return await server.listen(unused_tcp_port)

    outcome, _ = await asyncio.gather(measure(settings), later())
    assert outcome.result.num_succeeded == 1


def test_run_without_requests_is_reported():
    assert "No request arrived before the end" in table(outcome(seconds=0.0))


@pytest.mark.parametrize(
    "settings",
    [
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
        {"burstiness": 0.0},
        {"duration": 5.0},
        {"url": "ftp://somewhere"},
        {"url": "http://host:notaport"},
        {"num_prompts": 0},
        {"ramp_up_strategy": "linear"},
        {
            "ramp_up_strategy": "linear",
            "ramp_up_start_rps": 1.0,
            "ramp_up_end_rps": 2.0,
            "request_rate": 3.0,
        },
        {"dataset_name": "custom"},
        {"dataset_path": "prompts.jsonl"},
        {"percentile_metrics": "ttft,e2e"},
        {"metric_percentiles": "50,100"},
        {"metric_percentiles": "median"},
        {"goodput": ("itl:5",)},
        {"goodput": ("ttft:fast",)},
        {"header": ("NoEquals",)},
        {"header": ("X=a\r\nY: b",)},
        {"find_max_rps": True},
    ],
)
def test_invalid_settings_are_rejected(settings):
    with pytest.raises(ConfigError):
        BenchConfig(**settings)


async def interrupt(server, count):
    """Send Ctrl-C once `count` requests have arrived."""
    await server.wait_for_requests(count)
    os.kill(os.getpid(), signal.SIGINT)


def saturated(outcome, reason):
    result = dataclasses.replace(outcome.result, saturated=reason)
    return dataclasses.replace(outcome, result=result)


def unsaturated(outcome):
    """Remove the saturation that a busy test machine may cause."""
    return saturated(outcome, None)


def table(outcome):
    return printed(unsaturated(outcome))


def printed(outcome):
    text = io.StringIO()
    print_table(Console(file=text, width=80, highlight=False), outcome)
    return text.getvalue()
