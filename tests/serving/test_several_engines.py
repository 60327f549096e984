"""Several engines behind one server, and state that they share with several API workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.api.conftest import Reference
from tests.server import WAIT, Client, Server, command, gone, put_under_load, until
from tests.serving.test_recovery import Answer, read, streamed

TOKENS = 96
PROMPTS = [f"Story number {i}: " for i in range(12)]
BODIES = [
    {"prompt": p, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for p in PROMPTS
]
ENGINES = ("0", "1")
ENDLESS = 8000


@pytest.fixture(scope="module")
def server(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of two engines and two API workers. The last test ends it."""
    several = ["--data-parallel-size", "2", "--api-workers", "2", "--pooling", "last"]
    served = Server(str(model), *several, cwd=tmp_path_factory.mktemp("several"))
    yield served
    served.stop()


def check_texts(answers: list[Answer], reference: Reference) -> None:
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
        ("length", TOKENS, None)
    }


def of_engines(server: Server, name: str, **labels: str) -> list[float]:
    return [server.metric(f"tk:{name}", engine=engine, **labels) for engine in ENGINES]


def test_both_engines_work_and_their_metrics_add_up(server: Server, reference: Reference) -> None:
    async def run() -> list[Answer]:
        answers = [Answer() for _ in BODIES]
        await asyncio.gather(*(read(server, b, a) for b, a in zip(BODIES, answers, strict=True)))
        return answers

    answers = asyncio.run(run())
    assert [a.text for a in answers] == reference.texts(PROMPTS, TOKENS)
    assert "2, each with the complete model" in server.stderr
    for name, total in (
        ("request_success_total", len(PROMPTS)),
        ("generation_tokens_total", len(PROMPTS) * TOKENS),
    ):
        each = of_engines(server, name)
        assert sum(each) == total
        assert min(each) > 0
    until(server.is_idle)


def test_requests_of_both_engines_are_listed_and_ended(server: Server) -> None:
    with server.slowly():
        clients = [
            Client(server, ENDLESS, prompt=[i] * 20, headers={"X-Request-Id": f"r{i}"})
            for i in range(2)
        ]
        until(lambda: all(client.events for client in clients))
        # Perhaps of one engine: API workers may not know each other's requests yet.
        until(lambda: sum(of_engines(server, "num_requests_running")) == 2.0)
        assert server.http.get("/load").json()["num_requests_running"] == 2
        listed = server.http.get("/tk/requests").json()["requests"]
        assert len(listed) == 2
        for request in listed:
            assert server.http.delete(f"/tk/requests/{request['id']}").json()["num_requests"] == 1
        for client in clients:
            assert '"finish_reason":"abort"' in "".join(client.finish().events).replace(" ", "")
    assert server.http.post("/reset_prefix_cache").status_code == 200
    until(server.is_idle)


def test_prompt_tokens_of_embeddings_are_counted_per_engine(server: Server) -> None:
    texts = [f"{i} and more" for i in range(8)]
    before = of_engines(server, "prompt_tokens_total")
    answer = server.http.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()
    after = of_engines(server, "prompt_tokens_total")
    each = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(each) == answer["usage"]["prompt_tokens"]
    assert min(each) > 0


def test_a_cleared_prefix_cache_is_known_to_all_api_workers(server: Server) -> None:
    """A cached prompt goes to its engine, also if that is busy. Any other goes to the idle one."""
    prompt = [7] * 2000
    body = {"prompt": prompt, "max_tokens": 1}

    def place(http: httpx.Client) -> int:
        before = of_engines(server, "request_success_total")
        http.post("/v1/completions", json=body).raise_for_status()
        after = of_engines(server, "request_success_total")
        [engine] = [i for i, now in enumerate(after) if now > before[i]]
        return engine

    with (
        httpx.Client(base_url=server.url, timeout=WAIT) as one,
        httpx.Client(base_url=server.url, timeout=WAIT) as other,
        httpx.Client(base_url=server.url, timeout=WAIT) as third,
    ):
        homes = [place(http) for http in (one, other)]
        assert homes[0] == homes[1], "the first block decides if the loads are equal"
        endless = {"prompt": prompt, "max_tokens": 6000, "ignore_eos": True, "stream": True}
        with server.slowly(), third.stream("POST", "/v1/completions", json=endless) as stream:
            lines = stream.raise_for_status().iter_lines()
            next(lines)
            assert place(other) == homes[0]
            one.post("/reset_prefix_cache").raise_for_status()
            for http in (one, other):  # a worker that answers this has had the message before
                http.get("/load").raise_for_status()
            assert place(other) != homes[0]
    until(server.is_idle)


def test_pings_of_an_idle_engine_run_no_steps(server: Server) -> None:
    steps = server.metric("tk:iteration_tokens_total_count")
    asked = psutil.Process(server.cores[0].pid).num_ctx_switches().voluntary
    until(lambda: psutil.Process(server.cores[0].pid).num_ctx_switches().voluntary > asked)
    assert server.metric("tk:iteration_tokens_total_count") == steps


def test_streams_of_a_dead_engine_continue_on_the_other(
    server: Server, reference: Reference
) -> None:
    """Streams do not wait for its successor, whose start is held back."""
    _, killed = server.cores
    with server.holding("toolkit.engine.cores.core_process"):
        answers = asyncio.run(streamed(server, BODIES, killed.kill))
        check_texts(answers, reference)
        assert server.http.get("/health").status_code == 200, "the other one is healthy"
        assert "runs again" not in server.stderr
    until(lambda: "runs again" in server.stderr)
    assert server.stderr.count("SIGKILL") == 1, "the cause is logged once"
    assert "Traceback" not in server.stderr
    assert server.metric("tk:engine_restarts_total") == 1
    assert server.http.get("/health").status_code == 200
    until(server.is_idle)


def test_killing_the_server_ends_its_processes(server: Server) -> None:
    with server.slowly():
        clients = put_under_load(server, ENDLESS)
        others = [*server.cores, *server.workers]
        assert len(others) == 4
        sockets = [Path(command(core)[-1]) for core in server.cores]
        assert all(folder.is_dir() for folder in sockets)
        server.signal(signal.SIGKILL)
        until(lambda: all(gone(process) for process in others))
    assert not any(folder.exists() for folder in sockets)
    for client in clients:
        client.finish()
        assert client.broken is not None
