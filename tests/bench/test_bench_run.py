"""Whole runs against a server whose delays are known. Bounds are generous: machines are busy."""

from __future__ import annotations

import asyncio
import io
import os
import signal

import numpy as np
import orjson
import pytest
from rich.console import Console

from toolkit.bench.arrivals import arrival_times
from toolkit.bench.files import check_writable
from toolkit.bench.report import as_json, print_table
from toolkit.bench.run import measure
from toolkit.bench.wire import ServerError
from toolkit.config.clients import BenchConfig
from toolkit.errors import ConfigError


def config(server, **settings):
    return BenchConfig(**{"url": server.url, "random_input_len": 8, "random_output_len": 4} | settings)


async def test_counts_and_times_are_those_of_the_server(server):
    server.delay, server.gap = 0.2, 0.02
    outcome = await measure(config(server, request_rate=50.0, num_prompts=20))
    result = outcome.result
    assert outcome.model == "fake"
    assert (result.num_sent, result.num_succeeded, result.num_failed) == (20, 20, 0)
    assert (result.prompt_tokens, result.output_tokens) == (20 * 8, 20 * 4)
    assert 0.2 <= result.ttft_from_send.p50 < 2.0
    assert result.ttft.p50 >= result.ttft_from_send.p50
    assert 0.015 <= result.itl.mean < 1.0
    assert result.itl.count == 20 * 3
    assert result.itl_per_token
    assert result.tpot.mean == pytest.approx(result.itl.mean)
    assert result.e2e_from_send.p50 >= 0.2 + 3 * 0.02


async def test_the_load_is_open_loop(server):
    """A server that answers after 2.5 s gets every request before its first answer is out."""
    server.delay = 2.5
    outcome = await measure(config(server, request_rate=100.0, num_prompts=30, seed=5))
    planned = arrival_times(100.0, count=30, seed=5)
    assert planned[-1] < 0.8
    assert np.ptp(server.arrivals) < 2.4
    assert outcome.result.max_in_flight == 30


async def test_a_request_that_waits_for_a_place_is_late_by_its_schedule(server):
    server.delay = 0.2
    result = (await measure(config(server, request_rate=1000.0, num_prompts=4, max_concurrency=1))).result
    assert result.max_in_flight == 1
    assert result.ttft.max >= 0.75
    assert result.ttft_from_send.p50 < result.ttft.max
    assert result.place_wait.max >= 0.55


async def test_without_a_rate_a_limit_makes_each_answer_start_the_next_request(server):
    server.delay = 0.05
    result = (await measure(config(server, max_concurrency=3, num_prompts=12))).result
    assert (result.num_succeeded, result.max_in_flight) == (12, 3)
    assert result.wall >= 4 * 0.05


async def test_a_duration_ends_the_sending_not_the_answers(server):
    server.delay = 0.3
    result = (await measure(config(server, max_concurrency=2, duration=0.5))).result
    assert result.num_succeeded == result.num_sent
    assert result.num_sent in (2, 4)  # the second two go out at 0.3 s, unless the machine is very busy
    assert result.num_unfinished == 0


async def test_a_gap_is_spread_over_the_tokens_of_its_chunk(server):
    server.gap, server.tokens_per_chunk, server.running_usage = 0.1, 4, True
    result = (await measure(config(server, num_prompts=3, random_output_len=12))).result
    assert result.itl_per_token
    assert result.itl.count == 3 * 8
    assert 0.02 <= result.itl.mean < 0.09  # 0.1 were it not spread


async def test_chunks_are_counted_and_named_where_their_tokens_are_unknown(server):
    server.tokens_per_chunk = 4
    settings = config(server, num_prompts=3, random_output_len=12)
    outcome = await measure(settings)
    assert not outcome.result.itl_per_token
    assert outcome.result.itl.count == 3 * 2
    assert outcome.result.output_tokens == 36
    assert "ITL per chunk" in table(settings, outcome)


async def test_without_usage_chunks_stand_for_tokens_and_the_report_says_so(server):
    server.tokens_per_chunk, server.final_usage = 2, False
    result = (await measure(config(server, num_prompts=3, random_output_len=12))).result
    assert result.output_tokens == 3 * 6
    assert not result.itl_per_token


async def test_failures_are_grouped_with_an_example(server):
    server.refuse_every, server.break_off_every = 2, 3
    settings = config(server, num_prompts=12, max_concurrency=1)
    outcome = await measure(settings)
    groups = {group.cause: group for group in outcome.result.errors}
    assert groups["HTTP 503"].count == 6
    assert groups["HTTP 503"].example == "The queue is full."
    assert groups["answer broken off"].count == 2
    assert outcome.result.num_succeeded == 4
    assert "6 x HTTP 503: The queue is full." in table(settings, outcome)


async def test_chat_and_warm_ups(server):
    result = (await measure(config(server, endpoint="chat", num_prompts=5, num_warmups=3))).result
    assert result.num_succeeded == 5
    assert len(server.bodies) == 8
    assert len({body["messages"][0]["content"] for body in server.bodies}) == 8


async def test_ctrl_c_still_reports(server):
    server.delay = 30.0
    asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGINT)
    outcome = await measure(config(server, num_prompts=3))
    assert outcome.interrupted
    assert outcome.exit_code == 130
    assert outcome.result.num_unfinished == 3


async def test_no_server_is_one_readable_error(unused_tcp_port):
    with pytest.raises(ServerError, match=f"No server answers at http://127.0.0.1:{unused_tcp_port}"):
        await measure(BenchConfig(url=f"127.0.0.1:{unused_tcp_port}"))


async def test_a_server_that_refuses_everything_is_an_exit_code_of_one(server):
    server.refuse_every = 1
    assert (await measure(config(server, num_prompts=3))).exit_code == 1
    with pytest.raises(ServerError, match="The queue is full"):
        await measure(config(server, num_prompts=3, num_warmups=2))


async def test_the_json_is_versioned_complete_and_without_the_key(server):
    settings = config(server, num_prompts=3, api_key="secret")
    outcome = await measure(settings)
    text = orjson.dumps(as_json(settings, outcome.model, outcome.result, interrupted=False))
    document = orjson.loads(text)
    assert document["schema"] == "tk-bench/1"
    assert document["requests"]["succeeded"] == 3
    assert document["tokens"] == {"prompt": 24, "output": 12, "output_asked": 12}
    assert set(document["ttft_s"]) == {"mean", "p50", "p90", "p99", "max", "count"}
    assert b"secret" not in text


async def test_the_table_fits_80_columns(server):
    settings = config(server, num_prompts=3, request_rate=100.0)
    outcome = await measure(settings)
    shown = table(settings, outcome)
    assert max(map(len, shown.splitlines())) <= 80
    for name in ("TTFT", "TPOT", "ITL", "E2E", "p99", "3 succeeded, 0 failed"):
        assert name in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"request_rate": 0.0},
        {"request_rate": float("nan")},
        {"duration": 5.0},
        {"url": "ftp://somewhere"},
        {"url": "http://host:notaport"},
        {"num_prompts": 0},
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings):
    with pytest.raises(ConfigError):
        BenchConfig(**settings)


def test_an_unwritable_result_file_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="--save-result cannot write"):
        check_writable(tmp_path / "missing" / "result.json", "save_result")


def table(settings, outcome):
    text = io.StringIO()
    console = Console(file=text, width=80, highlight=False)
    print_table(console, settings, outcome.model, outcome.result, interrupted=outcome.interrupted)
    return text.getvalue()
