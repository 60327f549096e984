"""Routes for operators and tokenizer routes, on real servers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.api.conftest import CONTEXT, Reference
from tests.server import WAIT, Client, Server, until
from toolkit import __version__

HELLO = [{"role": "user", "content": "Hello"}]


def live(server: Server) -> list[dict[str, Any]]:
    # A new connection: either worker may answer.
    with httpx.Client(base_url=server.url, timeout=WAIT) as http:
        return http.get("/tk/requests").json()["requests"]


# ---- tokens


@pytest.mark.parametrize("text", ["The sea is", "", "ünïcödé 🙂", "<|end|>"])
def test_tokens_are_those_of_transformers(
    http: httpx.Client, reference: Reference, text: str
) -> None:
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    expected = reference.tokenizer.encode(text)
    assert answer["tokens"] == expected
    assert (answer["count"], answer["max_model_len"]) == (len(expected), CONTEXT)
    assert len(answer["token_strs"]) == len(expected)
    found = http.post("/detokenize", json={"tokens": expected}).json()
    assert found == {"prompt": text, "content": text}


def test_a_conversation_is_tokenized_as_in_chat(http: httpx.Client, reference: Reference) -> None:
    answer = http.post("/tokenize", json={"messages": HELLO, "model": "tiny"}).json()
    assert answer["tokens"] == reference.tokenizer.encode(reference.conversation(*HELLO))
    answer = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert answer["tokens"] == reference.tokenizer.encode("<|user|>Hello<|end|>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/tokenize", {"messages": "x"}, "messages"),
        ("/tokenize", {"prompt": "x" * 5_000_000}, "prompt"),
        ("/detokenize", {"tokens": [262]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_invalid_input_is_400(http: httpx.Client, path: str, body: object, param: str) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
        ("/tokenize", {"messages": HELLO}),
    ):
        assert http.post(path, json=body | {"model": "gpt-17"}).status_code == 404


def test_the_tokenizer_is_described(http: httpx.Client, reference: Reference) -> None:
    info = http.get("/tokenizer_info").json()
    assert info["chat_template"] == reference.tokenizer.chat_template
    assert info["special_tokens"]["eos_token"] == "<|endoftext|>"
    assert info["vocab_size"] == len(reference.tokenizer)
    assert info["model_max_length"] == CONTEXT


# ---- models, probes, settings, the prefix cache


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_model_list_has_a_card_for_each_name(http: httpx.Client, model: Path, path: str) -> None:
    cards = http.get(path).json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "org/other/name"]
    for card in cards:  # vllm bench serve reads root; others read permission
        assert (card["root"], card["parent"]) == (str(model), None)
        assert card["max_model_len"] == CONTEXT
        [permission] = card["permission"]
        assert permission["object"] == "model_permission"
        assert permission["allow_sampling"] is True


def test_requests_may_use_every_name(client: openai.OpenAI, model: Path) -> None:
    for name in ("tiny", "org/other/name"):
        assert client.models.retrieve(name).id == name
        answer = client.completions.create(model=name, prompt="a", max_tokens=1)
        assert answer.model == "tiny"
    for name in ("org/other", "other/name", str(model), model.name):
        with pytest.raises(openai.NotFoundError, match=r"Served: 'tiny', 'org/other/name'\."):
            client.models.retrieve(name)


def test_probes_and_version(http: httpx.Client) -> None:
    assert http.get("/version").json() == {"version": __version__}
    assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_the_prefix_cache_can_be_cleared(http: httpx.Client) -> None:
    body = {"prompt": [9] * 64, "max_tokens": 1}

    def cached() -> int:
        return http.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"][
            "cached_tokens"
        ]

    cached()
    assert cached() > 0
    assert http.post("/reset_prefix_cache").status_code == 200
    assert cached() == 0


def test_processes_are_measured(two_workers: Server) -> None:
    for process in ("server", "engine", "worker"):
        assert two_workers.metric("tk:process_cpu_seconds_total", process=process) > 0
        assert two_workers.metric("tk:process_resident_memory_bytes", process=process) > 30 * 2**20


# ---- live requests


@pytest.mark.parametrize("which", ["server", "two_workers"])
def test_live_requests_are_listed(which: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(which)
    until(lambda: live(server) == [])
    with server.slowly():
        check_live(server)
    until(lambda: live(server) == [])
    until(server.is_idle)


def check_live(server: Server) -> None:
    clients = [Client(server, 6000, stream=True) for _ in range(3)]
    until(lambda: all(client.events for client in clients))
    found = until(
        lambda: (
            (f := live(server)) and len(f) == 3 and all(r["num_output_tokens"] > 2 for r in f) and f
        )
    )
    for one in found:
        assert one["state"] == "running"
        assert one["num_prompt_tokens"] == 3
        assert 0 < one["age"] < 2 * WAIT
        assert one["tokens_per_second"] > 0
        assert one["num_blocks"] >= 1
        assert (one["num_preemptions"], one["priority"], one["n"]) == (0, 0, 1)
        assert one["origin"] == "127.0.0.1"
    load = httpx.get(f"{server.url}/load", timeout=WAIT).json()
    assert (load["server_load"], load["num_requests_running"], load["num_requests_waiting"]) == (
        3,
        3,
        0,
    )
    assert 0 < load["kv_cache_usage"] < 1

    for one in found:  # each on a new connection
        answer = httpx.delete(f"{server.url}/tk/requests/{one['id']}", timeout=WAIT)
        assert answer.json() == {
            "id": one["id"],
            "num_requests": 1,
            "deleted": True,
        }
    for client in clients:
        client.finish()
        assert client.broken is None
        assert client.events[-1] == "[DONE]"
        last = [json.loads(e) for e in client.events if e != "[DONE]" and json.loads(e)["choices"]][
            -1
        ]
        assert last["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize("path", ["/tk/requests/cmpl-order-66", "/abort_requests"])
def test_a_request_can_be_ended_by_its_response_id(server: Server, path: str) -> None:
    body = {
        "prompt": ["one", "two"],
        "n": 2,
        "max_tokens": 6000,
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-Request-Id": "order-66"}
    with (
        server.slowly(),
        httpx.Client(base_url=server.url, timeout=WAIT, headers=headers) as http,
        http.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        assert {r["n"] for r in live(server)} == {2}
        if path == "/abort_requests":
            body = {"request_ids": ["cmpl-order-66", "cmpl-nothing"]}
            assert httpx.post(f"{server.url}{path}", json=body, timeout=WAIT).is_success
        else:
            ended = httpx.delete(f"{server.url}{path}", timeout=WAIT).json()
            assert ended["num_requests"] == 2
        *_, done = (line for line in lines if line)
    assert done == "data: [DONE]"
    until(server.is_idle)


@pytest.mark.parametrize("id", ["cmpl-nothing", "", "cmpl", "x" * 5000])
def test_an_unknown_request_is_404(http: httpx.Client, id: str) -> None:
    answer = http.delete(f"/tk/requests/{id}")
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["message"]


def test_a_beam_search_can_be_ended_by_its_response_id(server: Server) -> None:
    body = {
        "prompt": "The sea",
        "use_beam_search": True,
        "n": 4,
        "max_tokens": 6000,
        "ignore_eos": True,
    }
    with server.slowly(), ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            httpx.post,
            f"{server.url}/v1/completions",
            json=body,
            headers={"X-Request-Id": "beams"},
            timeout=WAIT,
        )
        until(lambda: live(server) != [])
        beams = f"{server.url}/tk/requests/cmpl-beams"
        until(lambda: httpx.delete(beams, timeout=WAIT).status_code == 200)
        answer = asked.result()
    assert answer.status_code == 500
    assert "aborted before" in answer.json()["error"]["message"]
    until(server.is_idle)


def test_stored_responses_are_those_of_all_workers(two_workers: Server) -> None:
    """Each client has a connection, and so one of the workers in turn."""
    greedy: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}
    ids: list[str] = []
    for _ in range(4):
        with two_workers.openai() as client:
            previous = ids[-1] if ids else None
            done = client.responses.create(input="x", previous_response_id=previous, **greedy)
            ids.append(done.id)
    with two_workers.openai() as one, two_workers.openai() as other:
        assert one.responses.retrieve(ids[0]) == other.responses.retrieve(ids[0])
        listed = [len(list(each.responses.input_items.list(ids[-1]))) for each in (one, other)]
        assert listed == [7, 7]
        endless = greedy | {"max_output_tokens": 8000, "background": True}
        begun = one.responses.create(input="Hi", **endless)
        assert other.responses.cancel(begun.id).status == "cancelled"
        other.responses.delete(begun.id)
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(begun.id)
