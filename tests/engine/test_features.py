"""Requests whose features' bytes come from the front end when a core asks for them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from tests import checkpoints
from tests.engine.test_async_llm import PROMPT
from toolkit import AsyncLLM, SamplingParams
from toolkit.engine.features import Features
from toolkit.engine.front.features import FeatureStore
from toolkit.engine.messages import EngineRequest, GiveFeature
from toolkit.errors import EngineError
from toolkit.sequence import Feature, SequenceSpec

A, B = b"a" * 32, b"b" * 32


class Waiting:
    """A request with features, of a client."""

    def __init__(self, *digests: bytes, client: int = 0) -> None:
        self.spec = SimpleNamespace(features=[Feature(digest) for digest in digests])
        self.client, self.is_finished = client, False


@pytest.fixture
def features() -> Features:
    return Features()


def asked(features: Features) -> list[tuple[int, bytes]]:
    return [(client, message.digest) for client, message in features.pop_asks()]


def test_a_request_waits_for_all_of_its_features(features: Any):
    one, other = Waiting(A, B), Waiting(B, client=1)
    features.add(one, one.spec.features)
    features.add(other, other.spec.features)
    assert sorted(asked(features)) == [(0, A), (0, B)]
    features.receive(B, 0, b"second")
    assert features.pop_ready() == [other]
    features.receive(A, 0, b"first")
    assert features.pop_ready() == [one]
    assert features.data == {A: b"first", B: b"second"}
    features.add(late := Waiting(A, A), late.spec.features)
    assert (features.pop_ready(), asked(features)) == ([late], [])


def test_bytes_stay_until_the_last_request_ends(features: Any):
    for one in (requests := [Waiting(A), Waiting(A)]):
        features.add(one, one.spec.features)
    features.receive(A, 0, b"x")
    features.leave(requests[0])
    assert features.data == {A: b"x"}
    features.leave(requests[1])
    assert features.data == {}
    features.receive(A, 0, b"late")
    assert features.data == {}


def test_another_client_is_asked_when_the_first_has_none(features: Any):
    first, second = Waiting(A), Waiting(A, client=1)
    features.add(first, first.spec.features)
    features.add(second, second.spec.features)
    assert asked(features) == [(0, A)]
    features.receive(A, 0, None)
    assert [request for request, _ in features.pop_failed()] == [first]
    assert asked(features) == [(1, A)]
    features.receive(A, 1, b"x")
    assert features.pop_ready() == [second]


def test_another_client_is_asked_when_the_first_has_exited(features: Any):
    first, second = Waiting(A), Waiting(A, client=1)
    features.add(first, first.spec.features)
    features.add(second, second.spec.features)
    features.pop_asks()
    first.is_finished = True
    features.forget_client(0)
    assert asked(features) == [(1, A)]


def test_a_store_keeps_bytes_for_the_requests_that_run():
    store = FeatureStore()
    store.hold("one", {A: source(b"a"), B: source(b"b")})
    store.hold("two", {B: source(b"b")})
    store.release("one")
    assert store.load(A) is None
    assert store.load(B).result() == b"b"
    store.release("two")
    store.release("two")
    assert store.load(B) is None


def source(data: bytes) -> Callable[[], Future[bytes]]:
    """Return a source that has loaded these bytes."""
    done: Future[bytes] = Future()
    done.set_result(data)
    return lambda: done


def test_blocks_depend_on_the_features_within_them():
    features = (Feature(A, ((4, 3), (9, 2))), Feature(B, ((7, 1),)))
    spec = SequenceSpec(
        prompt_token_ids=[1],
        params=SamplingParams(),
        max_tokens=1,
        eos_token_ids=[],
        features=features,
    )
    none, first, both = "", spec.features_key(4, 5), spec.features_key(6, 8)
    assert len({none, first, both, spec.features_key(7, 8)}) == 4
    assert [spec.features_key(*one) for one in ((0, 4), (2, 7), (8, 9), (10, 12), (11, 12))] == [
        none, first, none, first, none,
    ]  # fmt: skip
    assert spec.cache_key == msgspec.structs.replace(spec, features=()).cache_key


def test_requests_share_no_blocks_if_their_features_differ():
    spec = SequenceSpec(
        prompt_token_ids=[1], params=SamplingParams(), max_tokens=1, eos_token_ids=[]
    )
    keys = {
        msgspec.structs.replace(spec, features=tuple(map(Feature, digests))).cache_key
        for digests in ((), (A,), (B,), (A, B))
    }
    assert len(keys) == 4


@pytest_asyncio.fixture
async def llm(checkpoint: Callable[[str], Path], forked_processes: None) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(str(checkpoint("llama3-gqa")), device="cpu", num_threads=1) as made:
        yield made


class Sent:
    """Records the features that a front end gives to its core."""

    def __init__(self, llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.given: list[tuple[GiveFeature, bytes | None]] = []
        self.link = llm.replicas[0].link
        send = self.link.send

        def record(message: Any, data: bytes | None = None) -> None:
            if isinstance(message, GiveFeature):
                self.given.append((message, data))
            send(message, data)

        monkeypatch.setattr(self.link, "send", record)


def request(id: str, *digests: bytes) -> EngineRequest:
    spec = SequenceSpec(
        prompt_token_ids=PROMPT,
        params=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, seed=0),
        max_tokens=20,
        eos_token_ids=[],
        features=tuple(map(Feature, digests)),
    )
    return EngineRequest(id=id, spec=spec)


async def tokens_of(stream: Any) -> list[int]:
    return [token async for delta in stream for token in delta.token_ids]


async def test_a_core_gets_the_bytes_that_it_lacks(llm: AsyncLLM, monkeypatch):
    sent, data = Sent(llm, monkeypatch), os.urandom(3_000_000)
    expected = checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)
    streams = [llm.start_request(request(str(i), A), features={A: source(data)}) for i in range(2)]
    async with asyncio.timeout(60):
        assert [await tokens_of(stream) for stream in streams] == [expected] * 2
    assert [(one.digest, one.is_found, given) for one, given in sent.given] == [(A, True, data)]
    assert llm._features.load(A) is None


async def test_a_core_that_follows_another_asks_again(llm: AsyncLLM, monkeypatch):
    expected = checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)
    psutil.Process(llm.replicas[0].link.pid).suspend()
    stream = llm.start_request(
        request("one", A, B), features={A: source(b"first"), B: source(b"second")}
    )
    psutil.Process(llm.replicas[0].link.pid).kill()
    async with asyncio.timeout(60):
        assert await tokens_of(stream) == expected


async def test_a_request_ends_if_nobody_has_its_bytes(llm: AsyncLLM):
    lost = llm.start_request(request("lost", A))
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="does not have its picture or sound"):
            await tokens_of(lost)
        expected = checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)
        assert await tokens_of(llm.start_request(request("next"))) == expected
