"""AsyncLLM when its core dies, fails, or sends unexpected messages."""

from __future__ import annotations

import asyncio
import gc
import types
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from tests import checkpoints, engines
from toolkit import LLM, AsyncLLM, SamplingParams
from toolkit.engine.cores import replica, revival
from toolkit.engine.cores.launch import Launch
from toolkit.engine.messages import (
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    StepProbe,
    StepReport,
)
from toolkit.errors import EngineError, ServerUnavailableError
from toolkit.scheduler.stats import EngineStats
from toolkit.sequence import SequenceSpec

pytestmark = pytest.mark.usefixtures("forked_processes")

PROMPT = [7, 3, 9, 12, 5]
INFO = types.SimpleNamespace(max_model_len=100, cache_tokens=1600, num_state_slots=0, adapters=[])


class ScriptedCore:
    """Core that sends the messages of the test and stores those that it receives."""

    client = 0
    has_exited = False

    def __init__(self) -> None:
        self.received: list[Any] = []
        self._says: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.received.append(message)

    async def receive(self) -> list[Any]:
        return [await self._says.get()]

    async def say(self, message: Any) -> None:
        """Return once the message has been handled."""
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
    """Engine for which no step is recent, and its core."""
    monkeypatch.setattr(replica, "STEP_MAX_AGE", -1.0)
    llm, core = AsyncLLM("no-model"), ScriptedCore()
    llm.connect_cores([(core, INFO)], types.SimpleNamespace(tokenizer=None, pictures=None))
    llm.cores.watch(0)
    yield llm, core
    await llm.shutdown()


async def state_of(llm: AsyncLLM) -> str:
    """Return the state reported to a health check."""
    try:
        await llm.check()
    except ServerUnavailableError as error:
        return error.message
    return "healthy"


STEPS = {
    "a step's figures": EngineOutputs(
        stats=EngineStats(num_running=2, num_tokens=2, num_sampled=2)
    ),
    "tokens": EngineOutputs(numbers=np.int64([8]).tobytes(), token_ids=np.int32([1]).tobytes()),
    "a first token": EngineOutputs([EngineOutput(8, [5])]),
    "an embedding": EngineOutputs([EngineOutput(8, [], embedding=b"\0\0\0\0")]),
}


@pytest.mark.parametrize("ends", ["by itself", "closed"])
async def test_an_ended_request_leaves_no_cycles(
    scripted: tuple[AsyncLLM, ScriptedCore], ends: str
) -> None:
    """Collecting it would hold up all streams, and its prompt would stay until then."""
    llm, core = scripted
    stream = llm.start_request(request("one"))
    state = weakref.ref(stream.state)
    gc.disable()
    try:
        if ends == "closed":
            stream.close()
        else:
            last = EngineOutput(0, [5], finish_reason="length")
            await core.say(EngineOutputs([last]))
            assert [delta.token_ids async for delta in stream] == [[5]]
        del stream
        assert state() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
async def test_a_successful_step_clears_a_failed_probe(scripted, monkeypatch, step):
    llm, core = scripted
    monkeypatch.setattr(replica, "STEP_MAX_AGE", 60.0)
    await core.say(StepReport("the step failed"))
    assert "the step failed" in await state_of(llm)
    await core.say(step)
    assert await state_of(llm) == "healthy"


async def test_outputs_of_failed_steps_do_not_prove_health(scripted, monkeypatch):
    llm, core = scripted
    monkeypatch.setattr(replica, "STEP_MAX_AGE", 60.0)
    monkeypatch.setattr(replica, "PROBE_TIMEOUT", 0.05)
    llm.replicas[0]._stepped_at = -1e9
    failed = EngineOutput(8, [], finish_reason="error", error="the step failed")
    await core.say(EngineOutputs([failed], stats=EngineStats(num_running=1)))
    assert "no step" in await state_of(llm)
    assert [type(message) for message in core.received] == [StepProbe]


async def test_core_deaths_count_only_for_requests_open_at_the_time(scripted):
    """A request submitted while no core runs does not count the earlier death."""
    llm, core = scripted
    before = llm.start_request(request("before"))
    llm.cores.pause(0)
    later = llm.start_request(request("later"))
    llm.cores.replace(0, core, INFO)
    for _ in range(2):
        assert llm.num_unfinished == 2
        llm.cores.pause(0)
        llm.cores.replace(0, core, INFO)
    with pytest.raises(EngineError, match="died 3 times"):
        await anext(before)
    assert llm.num_unfinished == 1
    llm.cores.pause(0)
    with pytest.raises(EngineError, match="died 3 times"):
        await anext(later)


async def test_answers_share_the_prompt_after_a_restart(scripted, checkpoint):
    """Answers use 4 blocks of prompt and one more per answer, although prefix caching is off."""
    llm, core = scripted
    llm.start_request(request("four", prompt=list(range(64)), n=4))
    await core.say(EngineOutputs([EngineOutput(number, [number + 5]) for number in range(4)]))
    llm.cores.pause(0)
    core.received.clear()
    llm.cores.replace(0, core, INFO)
    assert [(rest.num_sequences, rest.output_token_ids) for rest in core.received] == [
        (1, [n + 5]) for n in range(4)
    ]

    settings = {"device": "cpu", "block_size": 16, "num_gpu_blocks_override": 100}
    folder = str(checkpoint("llama3-gqa"))
    second = engines.core(LLM(folder, enable_prefix_caching=False, **settings))
    for rest in core.received:
        second.add(rest)
    while not all(len(live.output_token_ids) > 2 for live in second.scheduler.requests):
        second.step()
    blocks = [live.blocks[0] for live in second.scheduler.requests]
    assert {len(own) for own in blocks} == {5}
    assert len({block for own in blocks for block in own}) == 4 + 4


async def test_an_unhandled_error_ends_the_core_before_the_next_starts(
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
        stream = llm.start_request(request("one"))
        handle, num_handled = llm.handle_outputs, 0

        def fail_on_the_fourth(message: EngineOutputs, core: replica.Replica) -> None:
            nonlocal num_handled
            num_handled += 1
            if num_handled == 4:
                stopped = llm.start_request(request("during handling"))
                stopped.close()  # messages to the old core are possible at any time
                raise KeyError("a bug")
            handle(message, core)

        monkeypatch.setattr(llm, "handle_outputs", fail_on_the_fourth)
        async with asyncio.timeout(200):
            tokens = [token async for delta in stream for token in delta.token_ids]
        assert at_start == [False]
        assert llm.replicas[0].link.pid != first
    assert tokens == checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)


async def test_a_process_starts_before_a_core_counts_as_hung(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    spares: list[tuple[int, bool]] = []  # process, and whether the core was still in use

    class Watched(revival.CoreClient):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            spares.append((self.pid, llm.replicas[0].is_running))

    monkeypatch.setattr(revival, "CoreClient", Watched)
    folder = str(checkpoint("llama3-gqa"))
    async with AsyncLLM(folder, device="cpu", num_threads=1, worker_timeout=3.0) as llm:
        first = psutil.Process(llm.replicas[0].link.pid)
        async with asyncio.timeout(100):
            first.suspend()
            while not spares:
                await asyncio.sleep(0.01)
            spare = psutil.Process(spares[0][0])
            first.resume()
            while spare.is_running():
                await asyncio.sleep(0.01)
            assert llm.replicas[0].link.pid == first.pid
            first.suspend()  # before the request: else it may be answered first
            stream = llm.start_request(request("one"))
            tokens = [token async for delta in stream for token in delta.token_ids]
        assert [in_use for _, in_use in spares] == [True, True]
        assert llm.replicas[0].link.pid == spares[1][0]
        assert not first.is_running()
    assert tokens == checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)


async def test_a_core_that_hangs_during_its_start_is_replaced(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint("llama3-gqa")
    stopped: list[int] = []

    class Stopped(revival.CoreClient):
        """The first one stops, and gets half a second instead of the usual time."""

        def __init__(self, launch: Launch, startup_timeout: float) -> None:
            assert 60.0 < startup_timeout < 60.0 + 200.0
            super().__init__(launch, startup_timeout if stopped else 0.5)
            if not stopped:
                stopped.append(self.pid)
                psutil.Process(self.pid).suspend()

    monkeypatch.setattr(revival, "CoreClient", Stopped)
    monkeypatch.setattr(revival, "BACK_OFF", (0.0, 0.0, 0.0))
    async with AsyncLLM(str(model), device="cpu", num_threads=1, worker_timeout=60.0) as llm:
        first = llm.replicas[0].link.pid
        psutil.Process(first).suspend()  # it may not answer before it is killed
        stream = llm.start_request(request("one"))
        psutil.Process(first).kill()
        async with asyncio.timeout(200):
            tokens = [token async for delta in stream for token in delta.token_ids]
        assert not psutil.pid_exists(stopped[0])
        assert llm.replicas[0].link.pid not in (first, stopped[0])
    assert tokens == checkpoints.greedy(checkpoints.make_reference("llama3-gqa"), PROMPT, 20)


@pytest.mark.parametrize("kind", ["through Transformers", "int4"])
def test_every_kind_of_model_resumes_the_answers_of_another_core(
    checkpoint: Callable[[str], Path], kind: str
) -> None:
    quantized = Path(__file__).parents[1] / "weights" / "quantized" / "gptq-4bit-g32-asym-act-order"
    is_quantized = kind == "int4"
    model = str(quantized if is_quantized else checkpoint("llama3-gqa"))
    settings = {"device": "cpu", "num_threads": 1, "dtype": "float32"}
    settings |= {} if is_quantized else {"model_impl": "transformers"}
    first, second = (LLM(model, **settings) for _ in range(2))
    expected = list(checkpoints.generate(first, [PROMPT], max_tokens=20)[0].outputs[0].token_ids)
    rest = request("one")
    rest.output_token_ids = expected[:7]
    engines.core(second).add(rest)
    tokens: list[int] = []
    while engines.core(second).has_work:
        for message in engines.core(second).step().values():
            tokens += [token for output in message.outputs for token in output.token_ids]
            tokens += np.frombuffer(message.token_ids, np.int32).tolist()
    assert tokens == expected[7:]
