"""Limits of the queue, in requests and tokens, for every kind of request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.local import LocalServer
from tests.server import Client, Server, until

ROOM, ROOM_IN_TOKENS = 3, 40
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def small(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that runs one request at a time, and also embeds."""
    limits = (
        "--max-num-seqs",
        "1",
        "--max-queue",
        str(ROOM),
        "--max-queue-tokens",
        str(ROOM_IN_TOKENS),
    )
    server = LocalServer(
        str(model), *limits, "--pooling", "mean", cwd=tmp_path_factory.mktemp("cwd")
    )
    yield server
    server.stop()


@pytest.fixture
def busy(small: Server) -> Iterator[Server]:
    """The server with one running and one waiting request, of three prompt tokens each."""
    with small.slowly():
        clients = [Client(small, 8000), Client(small, 8000)]
        until(
            lambda: (
                small.metric("tk:num_requests_running")
                == small.metric("tk:num_requests_waiting")
                == 1
            )
        )
        yield small
        for live in small.http.get("/tk/requests").json()["requests"]:
            small.http.delete(f"/tk/requests/{live['id']}")
        for client in clients:
            client.finish()
    until(small.is_idle)


FEW = {"max_tokens": 2}
MESSAGES = {"messages": [{"role": "user", "content": "word " * 40}]}
ASKS = {
    "completions of several prompts": (COMPLETIONS, FEW | {"prompt": [[1], [2], [3]]}),
    "several completions": (COMPLETIONS, FEW | {"prompt": [1], "n": 3}),
    "beams": (COMPLETIONS, FEW | {"prompt": [1], "use_beam_search": True, "best_of": 3}),
    "embeddings": ("/v1/embeddings", {"input": [[1], [2], [3]]}),
    "scores": ("/v1/score", {"text_1": "a", "text_2": ["b", "c"]}),
    "ranks": ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
    "a completion of a long prompt": (COMPLETIONS, FEW | {"prompt": [1] * 38}),
    "a chat": ("/v1/chat/completions", FEW | MESSAGES),
    "a response": ("/v1/responses", {"input": "word " * 40, "max_output_tokens": 2}),
    "a message": ("/v1/messages", FEW | MESSAGES),
    "beams of a long prompt": (
        COMPLETIONS,
        FEW | {"prompt": [1] * 20, "use_beam_search": True, "best_of": 2},
    ),
    "an embedding of a long text": ("/v1/embeddings", {"input": [1] * 38}),
    "a score of long texts": ("/v1/score", {"text_1": "a " * 20, "text_2": "b " * 20}),
    "a rank of long texts": ("/v1/rerank", {"query": "a " * 20, "documents": ["b " * 20]}),
}


def test_every_kind_of_request_is_refused_by_a_full_queue(busy: Server) -> None:
    before = busy.metric("tk:admission_rejections_total", reason="queue")
    for name, (path, body) in ASKS.items():
        answer = busy.http.post(path, json=body)
        assert answer.status_code == 429, (name, answer.text)
        assert "wait to run" in answer.json()["error"]["message"], name
        assert int(answer.headers["retry-after"]) >= 1
    assert busy.metric("tk:admission_rejections_total", reason="queue") == before + len(ASKS)
    assert busy.metric("tk:num_requests_waiting") == 1, "no part of a refused request waits"


@pytest.mark.parametrize("name", ASKS)
def test_the_same_requests_run_on_an_idle_server(small: Server, name: str) -> None:
    path, body = ASKS[name]
    assert small.http.post(path, json=body).status_code == 200


def test_a_request_that_fits_the_queue_waits(busy: Server) -> None:
    """The queue takes exactly as many tokens as it has room for."""
    over = busy.http.post(COMPLETIONS, json={"prompt": [1] * (ROOM_IN_TOKENS - 2), "max_tokens": 1})
    assert over.status_code == 429
    waiting = Client(busy, 1, prompt=[1] * (ROOM_IN_TOKENS - 3))
    until(lambda: busy.metric("tk:num_requests_waiting") == 2)
    assert busy.http.post(COMPLETIONS, json={"prompt": [1], "max_tokens": 1}).status_code == 429
    for live in busy.http.get("/tk/requests").json()["requests"]:
        if live["num_prompt_tokens"] == 3:
            busy.http.delete(f"/tk/requests/{live['id']}")
    assert waiting.finish().num_tokens == 1
