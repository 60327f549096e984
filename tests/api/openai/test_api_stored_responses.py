"""Stored responses, with the official client: continued, listed, deleted, cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.api.conftest import Reference
from tests.local import LocalServer
from tests.server import Server, until
from toolkit.api.http import stored_responses
from toolkit.api.http.stored_responses import ResponseStore, StoredResponse

QUESTION = "What is a KV cache?"
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 6}


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with two keys that stores two responses."""
    options = ("--api-key", "first", "--api-key", "second", "--response-store", "2")
    cwd = tmp_path_factory.mktemp("keyed")
    server = LocalServer(str(model), "--served-model-name", "tiny", *options, cwd=cwd)
    yield server
    server.stop()


@contextmanager
def caller(server: Server, key: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        yield client


def test_response_is_continued(client: openai.OpenAI, reference: Reference) -> None:
    first = client.responses.create(input=QUESTION, instructions="Be brief.", **GREEDY)
    more = {"previous_response_id": first.id, "stream": True}
    *_, end = client.responses.create(input="And now?", **more, **GREEDY)
    second = end.response
    third = client.responses.create(input="So?", previous_response_id=second.id, **GREEDY)
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And now?"},
    ]
    chat = client.chat.completions.create(model="tiny", messages=turns, temperature=0, max_tokens=6)
    assert second.output_text == chat.choices[0].message.content
    turns.append({"role": "assistant", "content": second.output_text})
    turns.append({"role": "user", "content": "So?"})
    prompt = reference.conversation(*turns)
    assert third.usage.input_tokens == len(reference.tokenizer.encode(prompt))
    assert third.previous_response_id == second.id
    count = client.responses.input_tokens.count(input="So?", previous_response_id=second.id)
    assert count.input_tokens == third.usage.input_tokens
    assert client.responses.retrieve(third.id) == third
    listed = client.responses.input_items.list(third.id, order="asc", limit=2)
    texts = [item.content[0].text for item in listed]  # of all pages
    assert texts == [QUESTION, first.output_text, "And now?", second.output_text, "So?"]


def test_response_is_removed(client: openai.OpenAI) -> None:
    done = client.responses.create(input=QUESTION, **GREEDY)
    client.responses.delete(done.id)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{done.id}' not found"):
            call(done.id)
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(input="x", previous_response_id=done.id, **GREEDY)
    assert refused.value.code == "previous_response_not_found"
    unstored = client.responses.create(input=QUESTION, store=False, **GREEDY)
    assert unstored.store is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_response_runs_in_the_background(client: openai.OpenAI, reference: Reference) -> None:
    begun = client.responses.create(input=QUESTION, background=True, **GREEDY)
    assert begun.status == "in_progress"
    until(lambda: client.responses.retrieve(begun.id).status != "in_progress")
    done = client.responses.retrieve(begun.id)
    prompt = reference.conversation({"role": "user", "content": QUESTION})
    assert (done.status, done.background) == ("incomplete", True)
    assert done.output_text == reference.text(prompt, 6)
    assert client.responses.cancel(done.id) == done
    waited = client.responses.create(input=QUESTION, **GREEDY)
    with pytest.raises(openai.BadRequestError, match="only those with background"):
        client.responses.cancel(waited.id)


def test_response_in_the_background_is_cancelled(server: Server, client: openai.OpenAI) -> None:
    endless = GREEDY | {"max_output_tokens": 8000, "background": True}
    with server.slowly():
        begun, other = (client.responses.create(input=QUESTION, **endless) for _ in range(2))
        with pytest.raises(openai.BadRequestError, match="still in progress"):
            client.responses.create(input="x", previous_response_id=begun.id, **GREEDY)
        assert client.responses.cancel(begun.id).status == "cancelled"
        client.responses.delete(other.id)
    until(server.is_idle)
    assert client.responses.retrieve(begun.id).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(other.id)


def test_responses_of_a_key_are_its_own(keyed: Server) -> None:
    with caller(keyed, "first") as first, caller(keyed, "second") as second:
        done = first.responses.create(input=QUESTION, **GREEDY)
        for call in (second.responses.retrieve, second.responses.delete, second.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(done.id)
        with pytest.raises(openai.BadRequestError, match="not found"):
            second.responses.create(input="x", previous_response_id=done.id, **GREEDY)
        assert first.responses.retrieve(done.id) == done
        first.responses.create(input=QUESTION, **GREEDY)
        first.responses.create(input=QUESTION, **GREEDY)
        with pytest.raises(openai.NotFoundError, match="newest 2 "):
            first.responses.retrieve(done.id)


@pytest.mark.parametrize("top", [None, 2])
def test_log_probabilities_are_those_of_a_chat(client: openai.OpenAI, top: int | None) -> None:
    include: Any = ["message.output_text.logprobs"]
    more: dict[str, Any] = {} if top is None else {"top_logprobs": top}
    done = client.responses.create(input=QUESTION, include=include, **more, **GREEDY)
    events = list(
        client.responses.create(input=QUESTION, include=include, stream=True, **more, **GREEDY)
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=6,
        logprobs=True,
        top_logprobs=top,
    )
    expected = [
        (one.token, pytest.approx(one.logprob), len(one.top_logprobs))
        for one in chat.choices[0].logprobs.content
    ]
    found = done.output[0].content[0].logprobs
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    streamed = [one for event in deltas for one in event.logprobs]
    for logprobs in (found, streamed, events[-1].response.output[0].content[0].logprobs):
        assert [(one.token, one.logprob, len(one.top_logprobs)) for one in logprobs] == expected


def record(id: str, size: int = 0, **more: Any) -> StoredResponse:
    return StoredResponse(id, 0, b'{"status":"in_progress"}', b"x" * size, **more)


async def test_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_STORED_BYTES", 10_000)
    monkeypatch.setattr(stored_responses, "MAX_RESPONSE_BYTES", 8_000)
    store = ResponseStore(3)
    for id in "abcd":
        assert await store.add(record(id))
    assert [id for id in "abcd" if await store.find(0, id)] == ["b", "c", "d"]
    assert await store.add(record("e", 7_000))
    assert await store.add(record("f", 7_000))
    assert [id for id in "abcdef" if await store.find(0, id)] == ["f"]
    assert not await store.add(record("g", 9_000))
    await store.update(record("e"))  # evicted: it stays away
    assert await store.find(0, "e") is None
    assert await store.find(1, "f") is None
    assert not await ResponseStore(0).add(record("a"))


async def test_responses_of_a_dead_worker_fail() -> None:
    store = ResponseStore(3)
    for id, worker in (("a", 1), ("b", 2)):
        await store.add(record(id, engine_id=id, worker=worker))
    store.fail(1)
    found = [await store.find(0, id) for id in "ab"]
    assert [b"failed" in one.response for one in found] == [True, False]
    assert [one.engine_id for one in found] == ["", "b"]
