"""API workers that fail, or that start while the engine restarts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import zmq

from tests.server import WAIT, Client, Server, command, until

ENDLESS = 8000


@pytest.fixture(scope="module")
def server(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two workers. The last test ends it."""
    flags = ("--api-workers", "2", "--log-format", "json")  # which has tracebacks
    served = Server(str(bare_model), *flags, cwd=tmp_path_factory.mktemp("two"))
    yield served
    served.stop()


def test_a_worker_that_cannot_read_the_engine_is_replaced(server: Server) -> None:
    before = server.workers
    with server.slowly():
        send_nonsense(server, before)
    until(lambda: all_answer(server))


def send_nonsense(server: Server, before: list[psutil.Process]) -> None:
    clients = [Client(server, ENDLESS) for _ in range(2)]
    until(lambda: all(client.events for client in clients))
    with zmq.Context() as context, context.socket(zmq.PUSH) as nonsense:
        nonsense.connect(f"ipc://{command(server.core)[-1]}/out1")
        nonsense.send(b"\xc1")
        until(lambda: len(server.workers) == 2 and server.workers != before)
    until(lambda: sum(client.error is not None for client in clients) == 1)
    until(lambda: server.metric("tk:num_requests_running") == 1)
    until(lambda: "Traceback" in server.stderr and "exit code 1" in server.stderr)


def test_a_worker_that_starts_during_an_engine_restart_serves(server: Server) -> None:
    tracebacks = server.stderr.count("Traceback")
    with server.holding("toolkit.serving.api_worker"):
        another = replace_worker(server)
        server.cores[0].kill()
        until(lambda: "runs again" in server.stderr)
    until(lambda: all_answer(server))
    assert another in server.workers

    with server.holding("toolkit.serving.api_worker"):
        replace_worker(server)
        server.signal(signal.SIGTERM)
        assert server.wait() == 0
    assert server.stderr.count("Traceback") == tracebacks


def replace_worker(server: Server) -> psutil.Process:
    """Kill a worker. Returns its replacement as soon as that has started."""
    before = server.workers
    before[0].kill()
    return until(lambda: next((worker for worker in server.workers if worker not in before), None))


def all_answer(server: Server) -> bool:
    """Return True if every worker has answered one of some new connections."""
    port = int(server.url.rsplit(":", 1)[1])
    connections = [httpx.Client(base_url=server.url, timeout=WAIT) for _ in range(4)]
    try:
        for connection in connections:
            connection.post(
                "/v1/completions", json={"prompt": [1], "max_tokens": 1}
            ).raise_for_status()
        return all(
            any(open_one.laddr.port == port for open_one in worker.net_connections())
            for worker in server.workers
        )
    finally:
        for connection in connections:
            connection.close()
