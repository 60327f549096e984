"""Several engines behind one server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.api.conftest import Reference
from tests.server import Client, Server, until
from tests.serving.test_recovery import Answer, read, streamed

TOKENS = 96
PROMPTS = [f"Story number {i}: " for i in range(20)]
BODIES = [
    {"prompt": p, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for p in PROMPTS
]
ENGINES = ("0", "1")
ENDLESS = 8000


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two API workers"])
def server(
    request: pytest.FixtureRequest, model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    several = ["--data-parallel-size", "2", "--api-workers", str(request.param)]
    served = Server(str(model), *several, cwd=tmp_path_factory.mktemp("several"))
    yield served
    served.stop()


def of_engines(server: Server, name: str, **labels: str) -> list[float]:
    return [server.metric(f"tk:{name}", engine=engine, **labels) for engine in ENGINES]


def test_both_engines_work_and_their_metrics_add_up(server: Server, reference: Reference) -> None:
    async def run() -> list[Answer]:
        answers = [Answer() for _ in BODIES]
        await asyncio.gather(*(read(server, b, a) for b, a in zip(BODIES, answers, strict=True)))
        return answers

    answers = asyncio.run(run())
    assert [a.text for a in answers] == [reference.text(p, TOKENS) for p in PROMPTS]
    assert "2, each with the complete model" in server.stderr
    for name, total in (("request_success_total", 20), ("generation_tokens_total", 20 * TOKENS)):
        each = of_engines(server, name)
        assert sum(each) == total
        assert min(each) > 0
    until(server.is_idle)


def test_prompts_with_a_common_prefix_go_to_the_same_engine(server: Server) -> None:
    if server.workers:
        pytest.skip("API workers learn of each other's requests later")
    for number in range(4):
        before = of_engines(server, "request_success_total")
        hits = server.metric("tk:prefix_cache_hits_total")
        for question in "abc":
            prompt = f"{number} is what this begins with, and it is long enough: {question}"
            server.http.post(
                "/v1/completions", json={"prompt": prompt, "max_tokens": 2}
            ).raise_for_status()
        after = of_engines(server, "request_success_total")
        assert sorted(b - a for a, b in zip(before, after, strict=True)) == [0.0, 3.0]
        assert server.metric("tk:prefix_cache_hits_total") - hits == 2 * 48


def test_requests_of_both_engines_are_listed_and_ended(server: Server) -> None:
    with server.slowly():
        clients = [
            Client(server, ENDLESS, prompt=[i] * 20, headers={"X-Request-Id": f"r{i}"})
            for i in range(2)
        ]
        until(lambda: all(client.events for client in clients))
        if server.workers:  # they may not know each other's requests yet
            until(lambda: sum(of_engines(server, "num_requests_running")) == 2.0)
        else:
            until(lambda: of_engines(server, "num_requests_running") == [1.0, 1.0])
        assert server.http.get("/load").json()["num_requests_running"] == 2
        listed = server.http.get("/tk/requests").json()["requests"]
        assert len(listed) == 2
        for request in listed:
            assert server.http.delete(f"/tk/requests/{request['id']}").json()["num_requests"] == 1
        for client in clients:
            assert '"finish_reason":"abort"' in "".join(client.finish().events).replace(" ", "")
    assert server.http.post("/reset_prefix_cache").status_code == 200
    until(server.is_idle)


def test_streams_of_a_dead_engine_continue_on_the_other(
    server: Server, reference: Reference
) -> None:
    """Streams do not wait for its successor, whose start is held back."""
    _, killed = server.cores
    with server.holding("toolkit.engine.cores.core_process"):
        answers = asyncio.run(streamed(server, BODIES, killed.kill))
        assert [a.text for a in answers] == [reference.text(p, TOKENS) for p in PROMPTS]
        assert {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
            ("length", TOKENS, None)
        }
        assert server.http.get("/health").status_code == 200, "the other one is healthy"
        assert "runs again" not in server.stderr
    until(lambda: "runs again" in server.stderr)
    assert server.stderr.count("SIGKILL") == 1, "the cause is logged once"
    assert "Traceback" not in server.stderr
    assert server.metric("tk:engine_restarts_total") == 1
    assert server.http.get("/health").status_code == 200
    until(server.is_idle)
