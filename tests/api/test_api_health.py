"""What probes are told of an engine that works, hangs, or is being started again."""

from __future__ import annotations

import time
from collections.abc import Callable

import httpx
import pytest

from tests.api.serving import Client, Server, until

PROBES = ("/livez", "/readyz", "/health")


def statuses(server: Server) -> dict[str, int]:
    with httpx.Client(base_url=server.url, timeout=20) as http:
        return {path: http.get(path).status_code for path in PROBES}


def test_an_idle_engine_makes_a_step_to_show_that_it_can(server: Server) -> None:
    until(server.is_idle)
    time.sleep(1.1)  # by then the last step shows nothing any more
    before = server.metric("tk:iteration_tokens_total_count")
    assert statuses(server) == dict.fromkeys(PROBES, 200)
    assert server.metric("tk:iteration_tokens_total_count") == before + 1, "both probes share one step"
    assert server.metric("tk:num_requests_running") == 0


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_hung_engine_is_told_within_seconds_and_so_is_its_return(
    start: Callable[..., Server], num_workers: int
) -> None:
    server = start("--api-workers", str(num_workers))
    client = Client(server, 1500)
    until(lambda: client.events)
    assert statuses(server) == dict.fromkeys(PROBES, 200)
    server.core.suspend()
    begun = time.monotonic()
    until(lambda: statuses(server) == {"/livez": 200, "/readyz": 503, "/health": 503}, 15)
    assert time.monotonic() - begun < 15
    server.core.resume()
    until(lambda: statuses(server) == dict.fromkeys(PROBES, 200))
    client.finish()
    assert client.num_tokens == 1500


def test_while_the_engine_is_started_again_the_server_lives_and_is_not_ready(
    start: Callable[..., Server],
) -> None:
    server = start()
    server.core.kill()
    until(lambda: statuses(server) == {"/livez": 200, "/readyz": 503, "/health": 503})
    message = server.http.get("/health").json()["error"]["message"]
    assert "started again" in message
    until(lambda: statuses(server) == dict.fromkeys(PROBES, 200))
