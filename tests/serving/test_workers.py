"""Several API workers on one port, with one engine core."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.api.conftest import Reference
from tests.server import (
    KEEP_ALIVE,
    START_TIMEOUT,
    WAIT,
    Client,
    Process,
    Server,
    command,
    gone,
    until,
)
from tests.serving.test_shutdown import await_refusal

KEY = "a secret key"
ENDLESS = 8000
NUM_WORKERS = 3


@pytest.fixture(scope="module")
def several(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with NUM_WORKERS workers. Tests leave it idle and healthy, but for the last."""
    cwd = tmp_path_factory.mktemp("several")
    served = Server(
        str(model),
        "--served-model-name",
        "tiny",
        "--api-workers",
        str(NUM_WORKERS),
        cwd=cwd,
        TK_API_KEY=KEY,
    )
    yield served
    served.stop()


@pytest.fixture
def connections(several: Server) -> Iterator[list[httpx.Client]]:
    """Two connections to each worker, in any order."""
    key = {"Authorization": f"Bearer {KEY}"}
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                httpx.Client(base_url=several.url, timeout=WAIT, headers=key, limits=KEEP_ALIVE)
            )
            for _ in range(2 * NUM_WORKERS)
        ]
        for client in clients:
            assert client.get("/health").status_code == 200
        yield clients


def num_connections(server: Server) -> list[int]:
    """Open connections of each worker."""
    port = urlsplit(server.url).port
    return [
        sum(
            c.laddr.port == port and c.status == psutil.CONN_ESTABLISHED
            for c in worker.net_connections()
        )
        for worker in server.workers
    ]


def close_connections(server: Server) -> None:
    server.http.close()
    server.http = httpx.Client(base_url=server.url, timeout=WAIT, limits=KEEP_ALIVE)


def test_connections_are_distributed_evenly(
    several: Server, connections: list[httpx.Client]
) -> None:
    close_connections(several)
    until(lambda: num_connections(several) == [2] * NUM_WORKERS)


def test_every_worker_answers_as_the_reference(
    connections: list[httpx.Client], reference: Reference
) -> None:
    for client, prompt in zip(connections, "abcdef", strict=True):
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == reference.text(prompt, 12)


def test_workers_return_the_same_model_card(connections: list[httpx.Client]) -> None:
    cards = [client.get("/v1/models").content for client in connections]
    assert cards == cards[:1] * len(connections)


def test_every_worker_needs_the_key_and_hides_it(
    several: Server, connections: list[httpx.Client]
) -> None:
    for client in connections:
        client.headers.pop("Authorization")
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 401
    for process in [psutil.Process(several.pid), several.core, *several.workers]:
        assert KEY not in " ".join(command(process))


def counted(text: str, name: str) -> float:
    return sum(
        float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (.*)$", text, re.MULTILINE)
    )


def test_every_worker_exposes_the_metrics_of_all(
    connections: list[httpx.Client],
) -> None:
    names = {
        "tk:generation_tokens_total": 7.0,
        "tk:prompt_tokens_total": 3.0,
        "tk:e2e_request_latency_seconds_count": 1.0,
        "tk:inter_token_latency_seconds_count": 6.0,
        "tk:iteration_tokens_total_sum": 3.0 + 6.0,
        r'tk:request_success_total{.*"length".*}': 1.0,
        r'http_requests_total{.*"/v1/completions".*"2xx".*}': 1.0,
    }

    def read(client: httpx.Client) -> dict[str, float]:
        text = client.get("/metrics").text
        assert text.count("# TYPE tk:generation_tokens_total ") == 1
        return {name: counted(text, name) for name in (*names, "tk:generation_tokens_created")}

    before = until(lambda: (now := read(connections[0])) == read(connections[1]) and now)
    grown = {name: each * len(connections) for name, each in names.items()}
    after = {name: value + grown.get(name, 0.0) for name, value in before.items()}
    for client in connections:
        body = {"prompt": [5, 6, 7], "max_tokens": 7, "ignore_eos": True}
        assert client.post("/v1/completions", json=body).status_code == 200
    for client in connections:
        # If a worker is late, its last metrics are used.
        until(lambda client=client: read(client) == after)


def test_gauges_are_not_summed_over_workers(
    several: Server, connections: list[httpx.Client]
) -> None:
    body = {"prompt": [3] * 64, "max_tokens": ENDLESS, "ignore_eos": True, "stream": True}
    with several.slowly(), connections[0].stream("POST", "/v1/completions", json=body) as answer:
        chunks = answer.iter_raw()
        next(chunks)  # keeps the connection open
        until(lambda: several.metric("tk:num_requests_running") > 0)
        for client in connections[1:]:
            assert counted(client.get("/metrics").text, "tk:num_requests_running") == 1
    until(several.is_idle)


def test_if_workers_keep_dying_the_server_ends_with_a_message(several: Server) -> None:
    """Ends the server."""
    for _ in range(3):
        first = several.workers[0]
        first.send_signal(signal.SIGSEGV)
        until(
            lambda gone=first: len(several.workers) == NUM_WORKERS and gone not in several.workers
        )
    several.workers[0].send_signal(signal.SIGSEGV)
    assert several.wait() == 2
    last = several.lines[-1]
    assert last.startswith("tk: An API worker")
    assert f"signal {signal.SIGSEGV.value}" in last
    assert gone(several.core)


@pytest.fixture(scope="module")
def pair(bare_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two workers."""
    served = Server(str(bare_model), "--api-workers", "2", cwd=tmp_path_factory.mktemp("pair"))
    yield served
    served.stop()


def test_a_stopped_worker_does_not_block_the_metrics(pair: Server) -> None:
    """Its last metrics are used."""
    for _ in range(4):
        with httpx.Client(base_url=pair.url, timeout=WAIT) as client:
            client.post(
                "/v1/completions", json={"prompt": [1], "max_tokens": 5, "ignore_eos": True}
            )
    until(lambda: pair.metric("tk:generation_tokens_total") == 20)
    stopped = until(lambda: next((w for w in pair.workers if not w.net_connections()), None))
    stopped.suspend()
    assert pair.metric("tk:generation_tokens_total") == 20
    stopped.resume()
    close_connections(pair)
    until(lambda: num_connections(pair) == [0, 0])


def test_a_dead_worker_is_replaced_and_its_requests_get_an_error(pair: Server) -> None:
    """A second Ctrl-C ends the others with an error."""
    with pair.slowly():
        lose_a_worker(pair)
    assert "Traceback" not in pair.stderr


def lose_a_worker(server: Server) -> None:
    clients = [Client(server, ENDLESS, stream=i < 4) for i in range(6)]
    until(lambda: all(c.events for c in clients[:4]))
    until(lambda: server.metric("tk:num_requests_running") == len(clients))
    tokens = server.metric("tk:generation_tokens_total")
    prompts = server.metric("tk:prompt_tokens_total")  # does not grow from here on
    lost, kept = server.workers
    lost.kill()
    until(lambda: sum(c.error is not None for c in clients) == 3)
    assert all("ended unexpectedly" in c.error for c in clients if c.error)
    until(lambda: server.metric("tk:num_requests_running") == 3)
    until(lambda: len(server.workers) == 2 and lost not in server.workers)
    assert kept in server.workers
    until(lambda: f"process {lost.pid}" in server.stderr and "SIGKILL" in server.stderr)
    assert "3 of its requests got an error, 0 were cut" in server.stderr
    assert "3 sequences of an API worker that has exited were ended" in server.stderr
    assert server.metric("tk:generation_tokens_total") >= tokens
    assert server.metric("tk:prompt_tokens_total") == prompts > 0
    until(lambda: len(set(answering(server))) == 2)
    server.signal(signal.SIGINT)
    await_refusal(server)
    assert sum(c.error is None for c in clients) == 3
    server.signal(signal.SIGINT)
    assert server.wait() == 0
    for client in clients:
        client.finish()
        assert client.num_tokens is None
        assert client.broken is None
    assert sum("ended unexpectedly" in c.error for c in clients) == 3
    assert sum("shutting down" in c.error for c in clients) == 3
    assert gone(server.core)
    assert server.popen.stdout.read() == ""
    assert Counter(c.status for c in clients) == {200: 4, 503: 2}


def answering(server: Server) -> list[int]:
    """Process ids of the workers of some new connections."""
    port = urlsplit(server.url).port
    with ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=WAIT))
            body = {"prompt": [1], "max_tokens": 1}
            assert client.post("/v1/completions", json=body).status_code == 200
        return [w.pid for w in server.workers for c in w.net_connections() if c.laddr.port == port]


def test_a_start_up_error_of_all_workers_is_one_message(model: Path, tmp_path: Path) -> None:
    process = Process(
        "serve",
        str(model),
        "--port",
        "0",
        "--api-workers",
        "2",
        "--tokenizer",
        str(broken_tokenizer(tmp_path)),
        cwd=tmp_path,
    )
    try:
        assert process.wait(START_TIMEOUT) == 2
        assert process.lines[-1].startswith("tk: ")
        assert "tokenizer" in process.lines[-1]
        assert "Traceback" not in process.stderr
    finally:
        process.stop()


def broken_tokenizer(folder: Path) -> Path:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    return folder / "tokenizer"
