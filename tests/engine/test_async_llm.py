"""AsyncLLM when its core dies, fails or sends nonsense."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests import checkpoints
from toolkit import LLM, AsyncLLM, SamplingParams
from toolkit.engine.cores import replica, revival
from toolkit.engine.messages import EngineOutput, EngineOutputs, EngineRequest, Ping, Pong
from toolkit.errors import EngineError, ServerUnavailableError
from toolkit.scheduler.stats import EngineStats
from toolkit.sequence import SequenceSpec

PROMPT = [7, 3, 9, 12, 5]
INFO = types.SimpleNamespace(max_model_len=100, num_blocks=100, block_size=16)


class ScriptedCore:
    """A core that says what the test has it say, and keeps what it is told."""

    client = 0
    ended = False

    def __init__(self) -> None:
        self.told: list[Any] = []
        self._says: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.told.append(message)

    async def receive(self) -> list[Any]:
        return [await self._says.get()]

    async def say(self, message: Any) -> None:
        """Returns when it has been taken in."""
        self._says.put_nowait(message)
        while not self._says.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def stop(self) -> None:
        pass

    def kill(self) -> None:
        pass


def request(id: str, prompt: list[int] = PROMPT, n: int = 1) -> EngineRequest:
    params = SamplingParams(n=n, temperature=0.0, ignore_eos=True, detokenize=False)
    spec = SequenceSpec(prompt_token_ids=prompt, params=params, max_tokens=20, eos_token_ids=[])
    return EngineRequest(id=id, spec=spec)


@pytest_asyncio.fixture
async def scripted(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[AsyncLLM, ScriptedCore]]:
    """An engine whose news of a step are old at once, and its core."""
    monkeypatch.setattr(replica, "FRESH", -1.0)
    llm, core = AsyncLLM("no-model"), ScriptedCore()
    llm.attach([(core, INFO)], types.SimpleNamespace(tokenizer=None))
    llm.read()
    yield llm, core
    await llm.shutdown()


async def state_of(llm: AsyncLLM) -> str:
    """What a probe is told."""
    try:
        await llm.check()
    except ServerUnavailableError as error:
        return error.message
    return "well"


STEPS = {
    "a step's figures": EngineOutputs(
        stats=EngineStats(num_running=2, num_tokens=2, num_sampled=2)
    ),
    "tokens": EngineOutputs(numbers=np.int64([8]).tobytes(), token_ids=np.int32([1]).tobytes()),
    "a first token": EngineOutputs([EngineOutput(8, [5])]),
    "an embedding": EngineOutputs([EngineOutput(8, [], embedding=b"\0\0\0\0")]),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
async def test_one_failed_canary_is_forgotten_when_a_step_brings_something(
    scripted, monkeypatch, step
):
    llm, core = scripted
    monkeypatch.setattr(replica, "FRESH", 60.0)
    await core.say(Pong("the step failed"))
    assert "the step failed" in await state_of(llm)
    await core.say(step)
    assert await state_of(llm) == "well"


async def test_news_of_failing_steps_do_not_show_that_the_engine_is_well(scripted, monkeypatch):
    llm, core = scripted
    monkeypatch.setattr(replica, "FRESH", 60.0)
    monkeypatch.setattr(replica, "HUNG", 0.05)
    llm.replicas[0]._stepped_at = -1e9
    failed = EngineOutput(8, [], finish_reason="error", error="the step failed")
    await core.say(EngineOutputs([failed], stats=EngineStats(num_running=1)))
    assert "no step" in await state_of(llm)
    assert [type(message) for message in core.told] == [Ping]


async def test_deaths_count_for_the_requests_that_were_open_then(scripted):
    """A request that came while no core ran has not been met by that death."""
    llm, core = scripted
    before = llm.begin(request("before"))
    llm.pause(0)
    meanwhile = llm.begin(request("meanwhile"))
    llm.resume(0, core, INFO)
    for _ in range(2):
        assert llm.num_unfinished == 2
        llm.pause(0)
        llm.resume(0, core, INFO)
    with pytest.raises(EngineError, match="died 3 times"):
        await anext(before)
    assert llm.num_unfinished == 1
    llm.pause(0)
    with pytest.raises(EngineError, match="died 3 times"):
        await anext(meanwhile)


async def test_answers_to_one_prompt_share_it_after_the_engine_died_too(scripted, checkpoint):
    """In 4 blocks of prompt and one more for each answer, though nothing else is cached."""
    llm, core = scripted
    llm.begin(request("four", prompt=list(range(64)), n=4))
    await core.say(EngineOutputs([EngineOutput(number, [number + 5]) for number in range(4)]))
    llm.pause(0)
    core.told.clear()
    llm.resume(0, core, INFO)
    assert [(rest.num_sequences, rest.output_token_ids) for rest in core.told] == [
        (1, [n + 5]) for n in range(4)
    ]

    settings = {"device": "cpu", "block_size": 16, "num_gpu_blocks_override": 100}
    second = LLM(str(checkpoint("llama3-gqa")), enable_prefix_caching=False, **settings)._core
    for rest in core.told:
        second.add(rest)
    while not all(len(live.output_token_ids) > 2 for live in second.scheduler.requests):
        second.step()
    blocks = [live.blocks for live in second.scheduler.requests]
    assert {len(own) for own in blocks} == {5}
    assert len({block for own in blocks for block in own}) == 4 + 4


async def test_what_cannot_be_taken_in_ends_the_core_before_another_starts(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama3-gqa")
    at_start: list[bool] = []

    class Watched(revival.CoreClient):
        def __init__(self, *arguments: Any) -> None:
            at_start.append(psutil.pid_exists(first))
            super().__init__(*arguments)

    monkeypatch.setattr(revival, "CoreClient", Watched)
    async with AsyncLLM(str(model), device="cpu", num_threads=1) as llm:
        first = llm.replicas[0].link.pid
        stream = llm.begin(request("one"))
        take, num_taken = llm.take, 0

        def take_some(message: EngineOutputs, core: replica.Replica) -> None:
            nonlocal num_taken
            num_taken += 1
            if num_taken == 4:
                stopped = llm.begin(request("while it takes in"))
                stopped.close()  # the old core can be told things all the time
                raise KeyError("a bug")
            take(message, core)

        monkeypatch.setattr(llm, "take", take_some)
        async with asyncio.timeout(200):
            tokens = [token async for delta in stream for token in delta.token_ids]
        assert at_start == [False]
        assert llm.replicas[0].link.pid != first
    assert tokens == checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)


async def test_one_that_hangs_as_it_starts_is_replaced_in_its_turn(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama3-gqa")
    stopped: list[int] = []

    class Stopped(revival.CoreClient):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            if not stopped:
                stopped.append(self.pid)
                psutil.Process(self.pid).suspend()

    monkeypatch.setattr(revival, "CoreClient", Stopped)
    async with AsyncLLM(str(model), device="cpu", num_threads=1, worker_timeout=1.0) as llm:
        first = llm.replicas[0].link.pid
        stream = llm.begin(request("one"))
        psutil.Process(first).kill()
        async with asyncio.timeout(200):
            tokens = [token async for delta in stream for token in delta.token_ids]
        assert not psutil.pid_exists(stopped[0])
        assert llm.replicas[0].link.pid not in (first, stopped[0])
    assert tokens == checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)
