"""Probes of an engine that works, hangs, or restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.server import WAIT, Client, Server, until
from toolkit.engine.cores import replica
from toolkit.worker.worker import Worker

PROBES = ("/livez", "/readyz", "/health")
UNHEALTHY = {"/livez": 200, "/readyz": 503, "/health": 503}


def statuses(server: Server) -> dict[str, int]:
    """Ask all probes at once: each waits for seconds for an engine that hangs."""
    with (
        httpx.Client(base_url=server.url, timeout=WAIT) as http,
        ThreadPoolExecutor(len(PROBES)) as pool,
    ):
        return dict(zip(PROBES, [a.status_code for a in pool.map(http.get, PROBES)], strict=True))


@pytest.mark.parametrize("path", [*PROBES, "/v1/models", "/v1/models/tiny", "/metrics", "/docs"])
def test_head_is_answered_as_get_without_a_body(server: Server, path: str) -> None:
    before = server.metric("http_requests_total", method="HEAD", status="2xx")
    get, head = server.http.get(path), server.http.head(path)
    assert (get.status_code, head.status_code, head.content) == (200, 200, b"")
    assert head.headers.get("content-type") == get.headers.get("content-type")
    assert server.http.get("/livez").status_code == 200, "the connection stays open"
    assert server.http.get("/health").json() == {"status": "ok"}
    until(lambda: server.metric("http_requests_total", method="HEAD", status="2xx") == before + 1)
    assert server.http.head("/v1/completions").status_code == 405


def test_a_probe_of_an_idle_engine_runs_one_step(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica, "STEP_MAX_AGE", 0.3)  # of the server, which is in this process
    until(server.is_idle)

    def num_steps() -> float:
        time.sleep(0.33)  # the last step is too old to count
        before = server.metric("tk:iteration_tokens_total_count")
        assert statuses(server) == dict.fromkeys(PROBES, 200)
        return server.metric("tk:iteration_tokens_total_count") - before

    until(lambda: num_steps() == 1)  # shared by both probes, unless a second lies between
    assert server.metric("tk:num_requests_running") == 0


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "two API workers"])
def own(
    request: pytest.FixtureRequest, bare_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server that the tests below make unhealthy for a while."""
    server = Server(
        *(str(bare_model), "--api-workers", str(request.param)),
        cwd=tmp_path_factory.mktemp("own"),
        TEST_PROBE_TIMEOUT="0.5",
    )
    yield server
    server.stop()


def test_a_hung_engine_and_its_recovery_show_within_seconds(own: Server) -> None:
    with own.slowly():
        client = Client(own, 60)
        until(lambda: client.events)
        until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))
        own.core.suspend()
    until(lambda: statuses(own) == UNHEALTHY)
    own.core.resume()
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))
    assert client.finish().num_tokens == 60


def test_a_server_whose_engine_restarts_is_alive_and_not_ready(own: Server) -> None:
    with own.holding("toolkit.engine.cores.core_process"):
        own.core.kill()
        until(lambda: statuses(own) == UNHEALTHY)
        # Another worker may learn of it later, and a response with 200 has no body.
        until(lambda: b"being restarted" in own.http.get("/health").content)
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))


def test_an_engine_whose_steps_all_fail_is_unhealthy(own: Server) -> None:
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
            # The last successful step counts for a while, in the worker that saw it.
            until(lambda: all(statuses(own) == UNHEALTHY for _ in range(4 * num_workers)))
            end = time.monotonic() + 0.3  # time for several steps
            while time.monotonic() < end:
                assert statuses(own) == UNHEALTHY
        finally:
            stop.set()
        assert all(done.result() == {500} for done in asking)
        message = own.http.get("/health").json()["error"]["message"]
    assert "RuntimeError: a kernel met its end" in message
    assert ask() == 200
    until(lambda: statuses(own) == dict.fromkeys(PROBES, 200))


def test_a_model_whose_weights_become_nan_is_unhealthy(
    start_local: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its steps raise nothing and return no token."""
    server = start_local()
    execute = Worker.execute

    def ruin(worker: Worker, step: object) -> object:
        for weights in worker.runner.model.parameters():
            weights.data.fill_(float("nan"))
        return execute(worker, step)

    monkeypatch.setattr(Worker, "execute", ruin)
    Client(server, 3, stream=False).finish()
    assert statuses(server) == UNHEALTHY
    assert "not finite" in server.http.get("/health").json()["error"]["message"]
