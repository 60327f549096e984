"""Canned servers: they answer with metrics written by hand, without a network."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

TEXT = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {start}
# TYPE tk:num_requests_running gauge
tk:num_requests_running{{engine="0",model_name="demo"}} {running}
# TYPE tk:num_requests_waiting gauge
tk:num_requests_waiting{{engine="0",model_name="demo"}} {waiting}
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

LIVE = [
    {
        "id": "cmpl-old",
        "state": "running",
        "age": 9.0,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 80,
        "num_output_tokens": 40,
        "tokens_per_second": 20.5,
        "num_blocks": 9,
        "num_preemptions": 1,
        "priority": 0,
        "origin": "10.0.0.1",
        "n": 1,
    },
    {
        "id": "cmpl-new",
        "state": "waiting",
        "age": 0.5,
        "num_prompt_tokens": 12,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
        "tokens_per_second": 0.0,
        "num_blocks": 0,
        "num_preemptions": 0,
        "priority": 3,
        "origin": "10.0.0.2",
        "n": 2,
    },
]


@pytest.fixture
def metrics():
    """Return a function from the number of finished requests to the server's metrics."""

    def write(
        requests: float, running: float = 12.0, waiting: float = 3.0, start: float = 1.7e9
    ) -> str:
        return TEXT.format(
            start=start,
            running=running,
            waiting=waiting,
            prompt=1000 * requests,
            hits=250 * requests,
            generated=500 * requests,
            finished=requests,
            ttft_sum=0.006 * requests,
        )

    return write


class Canned:
    """A server that answers with `readings` in turn, and then with the last one.

    None is a refused connection. `key` is the operator's key; `requested` lists the requests.
    """

    def __init__(
        self, readings: list[str | None], *, is_tk: bool = True, key: str | None = None
    ) -> None:
        self.readings = readings
        self.is_tk = is_tk
        self.key = key
        self.requested: list[str] = []
        self.live = [dict(one) for one in LIVE]

    @property
    def transport(self) -> httpx.MockTransport:
        return httpx.MockTransport(self.answer)

    def answer(self, request: httpx.Request) -> httpx.Response:
        self.requested.append(f"{request.method} {request.url.path}")
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "demo-model"}]})
        if request.url.path == "/version":
            return httpx.Response(200, json={"version": "9.8.7"})
        if request.url.path == "/metrics":
            text = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
            if text is None:
                raise httpx.ConnectError("connection refused")
            return httpx.Response(200, text=text)
        return self.operate(request)

    def operate(self, request: httpx.Request) -> httpx.Response:
        """Answer the operator's routes, which only tk servers have."""
        if not self.is_tk:
            return httpx.Response(404, json={"detail": "Not Found"})
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            return httpx.Response(401, json={"error": {"message": "This needs the admin key."}})
        if request.url.path == "/server_info":
            engine = {"scheduler": {"max_num_seqs": 99, "scheduling_policy": "fcfs"}}
            return httpx.Response(
                200, json={"version": "9.8.7", "models": [{"model": "m", "engine": engine}]}
            )
        if request.method == "DELETE":
            id = request.url.path.rpartition("/")[2]
            before = len(self.live)
            self.live = [one for one in self.live if one["id"] != id]
            if len(self.live) == before:
                return httpx.Response(
                    404, json={"error": {"message": f"There is no live request '{id}'."}}
                )
            return httpx.Response(200, json={"id": id, "num_requests": 1, "deleted": True})
        return httpx.Response(200, json={"requests": self.live, "object": "list"})


@pytest.fixture
def vllm_text() -> str:
    """/metrics of a vLLM 0.32 on a CPU under load, without the metrics that are not read."""
    return (Path(__file__).parent / "data" / "vllm-0.32-metrics.txt").read_text()


@pytest.fixture
def canned():
    return Canned
