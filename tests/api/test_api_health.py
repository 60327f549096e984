"""What probes are told of an engine that works, hangs, or is being started again."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server import WAIT, Client, Server, until

PROBES = ("/livez", "/readyz", "/health")
ILL = {"/livez": 200, "/readyz": 503, "/health": 503}


def statuses(server: Server) -> dict[str, int]:
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        return {path: http.get(path).status_code for path in PROBES}


@pytest.mark.parametrize("path", [*PROBES, "/v1/models", "/v1/models/tiny", "/metrics", "/docs"])
def test_what_answers_get_answers_head_without_a_body(server: Server, path: str) -> None:
    before = server.metric("http_requests_total", method="HEAD", status="2xx")
    whole, head = server.http.get(path), server.http.head(path)
    assert (whole.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers.get("content-type") == whole.headers.get("content-type")
    assert server.http.get("/livez").status_code == 200, "the connection goes on"
    until(lambda: server.metric("http_requests_total", method="HEAD", status="2xx") == before + 1)
    assert server.http.head("/v1/completions").status_code == 405


def test_an_idle_engine_makes_a_step_to_show_that_it_can(server: Server) -> None:
    until(server.is_idle)

    def num_steps() -> float:
        time.sleep(1.1)  # by then the last step shows nothing any more
        before = server.metric("tk:iteration_tokens_total_count")
        assert statuses(server) == dict.fromkeys(PROBES, 200)
        return server.metric("tk:iteration_tokens_total_count") - before

    until(lambda: num_steps() == 1)  # shared by both probes, where no second lies between them
    assert server.metric("tk:num_requests_running") == 0


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two API workers"])
def own(
    request: pytest.FixtureRequest, bare_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that the tests below make ill, each for a while."""
    server = Server(
        str(bare_model), "--api-workers", str(request.param), cwd=tmp_path_factory.mktemp("own")
    )
    yield server
    server.stop()


def test_a_hung_engine_is_told_within_seconds_and_so_is_its_return(own: Server) -> None:
    client = Client(own, 1500)
    until(lambda: client.events)
    assert statuses(own) == dict.fromkeys(PROBES, 200)
    own.core.suspend()
    until(lambda: statuses(own) == ILL)
    own.core.resume()
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))
    client.finish()
    assert client.num_tokens == 1500


def test_while_the_engine_is_started_again_the_server_lives_and_is_not_ready(own: Server) -> None:
    with own.holding("toolkit.engine.cores.core_process"):
        own.core.kill()
        until(lambda: statuses(own) == ILL)
        # Another worker may hear of it a moment later, and an answer of 200 has no body.
        until(lambda: b"started again" in own.http.get("/health").content)
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))


def test_an_engine_whose_steps_all_fail_is_not_well_though_requests_come(own: Server) -> None:
    num_workers = max(1, len(own.workers))

    def ask() -> int:
        return Client(own, 3, stream=False).finish().status

    assert ask() == 200
    stop = threading.Event()

    def keep_asking() -> set[int]:
        return {ask() for _ in iter(stop.is_set, True)}

    with own.broken(), ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(keep_asking) for _ in range(8)]
        try:
            # For a second the last good step speaks for the engine, in the worker that saw it.
            until(lambda: all(statuses(own) == ILL for _ in range(4 * num_workers)))
            end = time.monotonic() + 3  # several steps are asked for in that time
            while time.monotonic() < end:
                assert statuses(own) == ILL
        finally:
            stop.set()
        assert all(done.result() == {500} for done in asking)
        message = own.http.get("/health").json()["error"]["message"]
    assert "RuntimeError: a kernel met its end" in message
    assert ask() == 200
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))


def test_a_model_whose_numbers_are_lost_is_not_well(
    start: Callable[..., Server], model: Path
) -> None:
    """No step raises anything, and none gives a token."""
    from safetensors.torch import load_file, save_file

    ruined = model.parent / "ruined"
    shutil.copytree(model, ruined)
    weights = load_file(ruined / "model.safetensors")
    save_file(
        {n: w * float("nan") for n, w in weights.items()},
        ruined / "model.safetensors",
        {"format": "pt"},
    )
    server = start(model=ruined)
    Client(server, 3, stream=False).finish()
    assert statuses(server) == ILL
    assert "not finite" in server.http.get("/health").json()["error"]["message"]
