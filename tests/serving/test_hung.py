"""Engines that hang, and state that several engines share with several API workers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.api.conftest import Reference
from tests.server import WAIT, Server, command, gone, until
from tests.serving.test_recovery import Answer, streamed
from toolkit.units import count

TOKENS = 96
PROMPTS = [f"Story number {i}: " for i in range(12)]
BODIES = [
    {"prompt": p, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True} for p in PROMPTS
]
TIMEOUT = ("--worker-timeout", "4")
ENDLESS = 6000


@pytest.fixture(scope="module")
def several(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two engines behind two API workers. They also serve embeddings."""
    flags = ("--data-parallel-size", "2", "--api-workers", "2", "--pooling", "last", *TIMEOUT)
    served = Server(str(model), *flags, cwd=tmp_path_factory.mktemp("hung"))
    yield served
    served.stop()


def has_all(answers: list[Answer], reference: Reference) -> bool:
    assert [a.text for a in answers] == [reference.text(p, TOKENS) for p in PROMPTS]
    return {(a.finish_reason, a.usage["completion_tokens"], a.error) for a in answers} == {
        ("length", TOKENS, None)
    }


def outlive(server: Server, hung: psutil.Process) -> list[Answer]:
    """Stream all answers while a process hangs. It hangs until the server replaces it."""
    return asyncio.run(asyncio.wait_for(streamed(server, BODIES, hung.suspend), WAIT))


def successes(server: Server, **labels: str) -> list[float]:
    return [server.metric("tk:request_success_total", engine=engine, **labels) for engine in "01"]


def test_prompt_tokens_of_embeddings_are_counted_per_engine(
    several: Server,
) -> None:
    texts = [f"{i} and more" for i in range(8)]
    answer = several.http.post("/v1/embeddings", json={"input": texts}).raise_for_status().json()
    each = [several.metric("tk:prompt_tokens_total", engine=engine) for engine in "01"]
    assert sum(each) == answer["usage"]["prompt_tokens"]
    assert min(each) > 0


def test_a_cleared_prefix_cache_is_known_to_all_api_workers(several: Server) -> None:
    """A cached prompt goes to its engine, also if that is busy. Any other goes to the idle one."""
    prompt = [7] * 2000
    body = {"prompt": prompt, "max_tokens": 1}

    def place(http: httpx.Client) -> int:
        before = successes(several)
        http.post("/v1/completions", json=body).raise_for_status()
        [engine] = [i for i, now in enumerate(successes(several)) if now > before[i]]
        return engine

    with (
        httpx.Client(base_url=several.url, timeout=WAIT) as one,
        httpx.Client(base_url=several.url, timeout=WAIT) as other,
        httpx.Client(base_url=several.url, timeout=WAIT) as third,
    ):
        homes = [place(http) for http in (one, other)]
        assert homes[0] == homes[1], "the first block decides if the loads are equal"
        endless = {"prompt": prompt, "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
        with several.slowly(), third.stream("POST", "/v1/completions", json=endless) as stream:
            lines = stream.raise_for_status().iter_lines()
            next(lines)
            assert place(other) == homes[0]
            one.post("/reset_prefix_cache").raise_for_status()
            for http in (one, other):  # a worker that answers this has had the message before
                http.get("/load").raise_for_status()
            assert place(other) != homes[0]
    until(several.is_idle)


def test_a_hung_engine_is_replaced_and_its_streams_continue(
    several: Server, reference: Reference
) -> None:
    """The other engine continues them."""
    before = several.cores
    hung = before[1]
    answers = outlive(several, hung)
    assert has_all(answers, reference)
    until(lambda: "runs again" in several.stderr)
    assert several.stderr.count("alive but has made no step for 4 s") == 1, (
        "the cause is logged once"
    )
    assert "Traceback" not in several.stderr
    assert gone(hung)
    assert before[0] in several.cores
    assert len(several.cores) == 2
    assert several.metric("tk:engine_restarts_total", engine="1") == 1
    assert several.http.get("/health").status_code == 200
    until(several.is_idle)


def test_the_only_engine_is_replaced_with_its_ranks(
    start: Callable[..., Server], model: Any, reference: Reference
) -> None:
    server = start(
        "--tensor-parallel-size", "2", "--served-model-name", "tiny", *TIMEOUT, model=model
    )
    assert f"({count(reference.model.num_parameters())} parameters" in server.stderr, "of all ranks"
    [hung] = server.cores
    ranks = [child for child in hung.children() if "toolkit.executor.rank" in command(child)]
    assert len(ranks) == 1
    answers = outlive(server, hung)
    assert has_all(answers, reference)
    assert server.stderr.count("alive but has made no step for 4 s") == 1
    assert "Traceback" not in server.stderr
    until(lambda: all(map(gone, [hung, *ranks])))
    assert server.cores != [hung]


def test_pings_of_an_idle_engine_run_no_steps(several: Server) -> None:
    steps = several.metric("tk:iteration_tokens_total_count")
    asked = psutil.Process(several.cores[0].pid).num_ctx_switches().voluntary
    until(lambda: psutil.Process(several.cores[0].pid).num_ctx_switches().voluntary > asked)
    assert several.metric("tk:iteration_tokens_total_count") == steps
