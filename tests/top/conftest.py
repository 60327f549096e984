"""Canned metrics: readings of a server, written out by hand."""

from __future__ import annotations

import httpx
import pytest

TEXT = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.7e+09
# TYPE tk:num_requests_running gauge
tk:num_requests_running{{engine="0",model_name="demo"}} {running}
# TYPE tk:num_requests_waiting gauge
tk:num_requests_waiting{{engine="0",model_name="demo"}} 3.0
# TYPE tk:kv_cache_usage_perc gauge
tk:kv_cache_usage_perc{{engine="0",model_name="demo"}} 0.432
# TYPE tk:prompt_tokens_total counter
tk:prompt_tokens_total{{engine="0",model_name="demo"}} {prompt}
# TYPE tk:generation_tokens_total counter
tk:generation_tokens_total{{engine="0",model_name="demo"}} {generated}
# TYPE tk:prefix_cache_queries_total counter
tk:prefix_cache_queries_total{{engine="0",model_name="demo"}} {prompt}
# TYPE tk:prefix_cache_hits_total counter
tk:prefix_cache_hits_total{{engine="0",model_name="demo"}} {hits}
# TYPE tk:num_preemptions_total counter
tk:num_preemptions_total{{engine="0",model_name="demo"}} 7.0
# TYPE tk:request_success_total counter
tk:request_success_total{{engine="0",finished_reason="stop",model_name="demo"}} {finished}
tk:request_success_total{{engine="0",finished_reason="length",model_name="demo"}} 2.0
tk:request_success_total{{engine="0",finished_reason="abort",model_name="demo"}} 0.0
# TYPE tk:time_to_first_token_seconds histogram
tk:time_to_first_token_seconds_bucket{{engine="0",le="0.01",model_name="demo"}} {finished}
tk:time_to_first_token_seconds_bucket{{engine="0",le="0.02",model_name="demo"}} {finished}
tk:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="demo"}} {finished}
tk:time_to_first_token_seconds_sum{{engine="0",model_name="demo"}} {ttft_sum}
tk:time_to_first_token_seconds_count{{engine="0",model_name="demo"}} {finished}
"""


@pytest.fixture
def metrics():
    """A function from an amount of finished work, in requests, to the server's metrics then."""

    def write(requests: float, running: float = 12.0) -> str:
        return TEXT.format(
            running=running,
            prompt=1000 * requests,
            hits=250 * requests,
            generated=500 * requests,
            finished=requests,
            ttft_sum=0.006 * requests,
        )

    return write


@pytest.fixture
def serve(metrics):
    """A function from a list of readings to a transport that gives one after the other, and then the last.

    None stands for a server that is gone. The list may be changed meanwhile.
    """

    def transport(readings: list[str | None]) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/v1/models":
                return httpx.Response(200, json={"data": [{"id": "demo-model"}]})
            if request.url.path == "/version":
                return httpx.Response(200, json={"version": "9.8.7"})
            text = readings.pop(0) if len(readings) > 1 else readings[0]
            if text is None:
                raise httpx.ConnectError("connection refused")
            return httpx.Response(200, text=text)

        return httpx.MockTransport(answer)

    return transport
