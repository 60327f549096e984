"""AsyncLLM over several cores: outputs, and requests of a core that dies or is permanently lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests import checkpoints
from tests.checkpoints import VOCAB
from tests.engine.test_async_llm import INFO, ScriptedCore, request
from toolkit import AsyncLLM, SamplingParams
from toolkit.engine.cores import replica
from toolkit.engine.messages import (
    Abort,
    EngineOutput,
    EngineOutputs,
    EngineRequest,
    ListRequests,
    PrefixCacheCleared,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
    StepReport,
)
from toolkit.errors import EngineDeadError, ServerUnavailableError
from toolkit.scheduler.stats import EngineStats

pytestmark = pytest.mark.usefixtures("forked_processes")

NEW_TOKENS = 12


@pytest.mark.parametrize(("name", "tensor"), [("gpt2", 1), ("llama3-gqa", 2)])
async def test_tokens_and_logprobs_of_both_engines_match_transformers(checkpoint, name, tensor):
    model, rng = checkpoints.make_reference(name), random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in (1, 17, 40, 23, 9, 30)]
    settings = {
        "num_threads": 1,
        "num_gpu_blocks_override": 200,
        "block_size": 4,
        "max_num_seqs": 8,
    }
    params = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0
    )
    async with AsyncLLM(
        str(checkpoint(name)), data_parallel_size=2, tensor_parallel_size=tensor, **settings
    ) as llm:

        async def answer(prompt: list[int]) -> Any:
            return [output async for output in llm.generate({"prompt_token_ids": prompt}, params)][
                -1
            ]

        results = await asyncio.gather(*(answer(prompt) for prompt in prompts))
        assert [one.info.world_size for one in llm.cores.cores] == [tensor] * 2
        for engine in ("0", "1"):
            labels = {"model_name": str(checkpoint(name)), "engine": engine}
            ended = {**labels, "finished_reason": "length"}
            assert llm.metrics.registry.get_sample_value("tk:request_success_total", ended) > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert list(result.outputs[0].token_ids) == checkpoints.greedy(model, prompt, NEW_TOKENS)
        expected = checkpoints.logits(model, prompt).log_softmax(-1)
        for position, found in enumerate(result.prompt_logprobs[1:]):
            token = prompt[position + 1]
            assert found[token].logprob == pytest.approx(float(expected[position, token]), abs=1e-4)


Pair = tuple[AsyncLLM, ScriptedCore, ScriptedCore]


@pytest_asyncio.fixture
async def scripted() -> AsyncIterator[Pair]:
    """Engine of two cores that send the messages of the test."""
    llm, cores = AsyncLLM("no-model"), (ScriptedCore(), ScriptedCore())

    class Inputs:
        tokenizer = pictures = None

    llm.connect_cores([(core, INFO) for core in cores], Inputs())
    for index in range(2):
        llm.cores.watch(index)
    yield llm, *cores
    await llm.shutdown()


def numbers(core: ScriptedCore) -> list[int]:
    return [message.number for message in core.received if isinstance(message, EngineRequest)]


async def test_requests_of_a_dead_core_move_to_the_other_at_once(scripted: Pair) -> None:
    llm, first, second = scripted
    streams = [llm.start_request(request(str(i), prompt=[i] * 20, n=2)) for i in range(4)]
    assert len(numbers(first)) == len(numbers(second)) == 2
    [lost] = [streams[i] for i in range(4) if numbers(first)[0] == streams[i].request.number]
    number = lost.request.number
    await first.say(EngineOutputs([EngineOutput(number, [5]), EngineOutput(number + 1, [6])]))
    before = numbers(second)
    second.received.clear()
    llm.cores.pause(0)
    rest = [message for message in second.received if isinstance(message, EngineRequest)]
    assert [
        (one.number, one.output_token_ids) for one in rest if one.number in (number, number + 1)
    ] == [
        (number, [5]),
        (number + 1, [6]),
    ]
    assert len(rest) == 4, "both answers of both requests"
    assert all(one.num_sequences == 1 and one.number not in before for one in rest)
    lost.close()
    assert second.received[-1] == Abort([number, number + 1], 0)

    third = ScriptedCore()
    llm.cores.replace(0, third, INFO)
    assert third.received == [], "no request waited for it"
    llm.start_request(request("late"))
    assert len(third.received) == 1, "it has the least load"


async def test_cores_that_die_together_count_as_one_death() -> None:
    llm, cores = AsyncLLM("no-model"), [ScriptedCore() for _ in range(4)]

    class Inputs:
        tokenizer = pictures = None

    llm.connect_cores([(core, INFO) for core in cores], Inputs())
    streams = [llm.start_request(request(str(i), prompt=[i] * 20)) for i in range(8)]
    llm.cores.pause(0, 1, 2)
    assert len(numbers(cores[3])) == 8
    assert max(stream.num_deaths for stream in streams) == 1
    llm.cores.pause(1)  # reported again
    assert max(stream.num_deaths for stream in streams) == 1
    await llm.shutdown()


async def test_moved_requests_do_not_count_as_uncomputed_prompts(scripted: Pair) -> None:
    llm, first, second = scripted
    stream = llm.start_request(request("long", prompt=list(range(4000))))
    index = 0 if numbers(first) else 1
    core = (first, second)[index]
    await core.say(EngineOutputs([EngineOutput(stream.request.number, [5])]))
    llm.cores.pause(index)
    llm.cores.replace(index, ScriptedCore(), INFO)
    for i in range(4):
        llm.start_request(request(str(i), prompt=[i] * 20))
    moved = (first, second)[1 - index]
    assert len(numbers(moved)) > 1, "the rest of an answer is a small load"


async def test_a_core_that_fails_its_requests_is_avoided(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise it would look idle and get all requests."""
    llm, first, second = scripted
    # Otherwise it is trusted again after five seconds, which the loop may take on a busy machine.
    monkeypatch.setattr(replica, "PROBE_TIMEOUT", 1e9)
    for i in range(20):
        stream = llm.start_request(request(str(i), prompt=[i] * 20))
        if stream.request.number in numbers(first):
            failed = EngineOutput(stream.request.number, [], finish_reason="error", error="no luck")
            await first.say(EngineOutputs([failed]))
    assert len(numbers(first)) <= replica.MAX_FAILURES
    assert len(numbers(second)) >= 17


async def test_a_hung_core_is_avoided_without_health_checks(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, first, second = scripted
    known = list(range(400))
    stuck = llm.start_request(request("stuck", prompt=known))
    silent, other = (first, second) if numbers(first) else (second, first)
    monkeypatch.setattr(replica, "PROBE_TIMEOUT", -1.0)
    await other.say(StepReport())
    stuck.close()
    for i in range(3):
        llm.start_request(request(str(i), prompt=known))
        await other.say(StepReport())
    assert (len(numbers(silent)), len(numbers(other))) == (1, 3)


async def test_a_cleared_prefix_cache_attracts_no_requests(scripted: Pair) -> None:
    """Check this too when another front end cleared the cache."""
    llm, first, second = scripted
    known = list(range(400))
    llm.start_request(request("one", prompt=known)).close()
    home, other = (first, second) if numbers(first) else (second, first)
    busy = llm.start_request(request("two", prompt=known))
    await home.say(EngineOutputs([EngineOutput(busy.request.number, [5])]))
    assert len(numbers(home)) == 2
    await home.say(PrefixCacheCleared())
    llm.start_request(request("three", prompt=known))
    assert len(numbers(other)) == 1


async def test_requests_without_a_core_wait_for_the_first_replacement(
    scripted: Pair,
) -> None:
    llm, *before = scripted
    llm.start_request(request("one"))
    for index, core in enumerate(before):
        llm.cores.pause(index)
        core.received.clear()
    llm.start_request(request("later"))
    third = ScriptedCore()
    llm.cores.replace(1, third, INFO)
    assert numbers(third) == [0, 1]
    assert [core.received for core in before] == [[], []]


async def test_messages_of_a_dead_core_are_dropped(scripted: Pair) -> None:
    llm, first, second = scripted
    stream = llm.start_request(request("one"))
    core, index = (first, 0) if numbers(first) else (second, 1)
    llm.cores.pause(index)
    core._says.put_nowait(EngineOutputs([EngineOutput(stream.request.number, [5])]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert stream.state.sequences[0].token_ids == []


async def test_a_server_continues_without_a_lost_engine(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _, second = scripted
    monkeypatch.setattr(replica, "STEP_MAX_AGE", 1e9)
    for core in scripted[1:]:
        await core.say(EngineOutputs(stats=EngineStats(num_sampled=1)))
    await llm.check()
    llm.cores.pause(0)
    await llm.check()  # a restarting engine is ignored while another is healthy
    await llm.check_some()
    llm.cores.remove(0, EngineDeadError("Engine 0: out of everything."))
    with pytest.raises(EngineDeadError, match="Engine 0: out of everything"):
        await llm.check()
    await llm.check_some()
    llm.start_request(request("one"))
    assert len(numbers(second)) == 1
    assert not llm.died.is_set()

    llm.cores.pause(1)
    with pytest.raises(ServerUnavailableError, match="being restarted"):
        await llm.live_requests()
    llm.cores.remove(1, EngineDeadError("Engine 1: the same."))
    assert llm.died.is_set()
    with pytest.raises(EngineDeadError, match="Engine 1"):
        llm.start_request(request("two"))


async def test_an_engine_whose_steps_fail_is_named(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, first, second = scripted
    monkeypatch.setattr(replica, "STEP_MAX_AGE", 1e9)
    await first.say(StepReport())
    await second.say(StepReport("no memory"))
    with pytest.raises(ServerUnavailableError, match="Engine 1's steps fail: no memory"):
        await llm.check()
    await llm.check_some()


async def test_each_engine_has_its_own_throughput(scripted: Pair) -> None:
    llm, first, second = scripted
    llm.metrics.observe_throughput()
    await asyncio.sleep(0.01)
    for core, num_steps in ((first, 1), (second, 3)):
        for _ in range(num_steps):
            await core.say(EngineOutputs(stats=EngineStats(num_tokens=30, num_sampled=10)))
    steps, computed, generated = llm.metrics.observe_throughput()
    assert computed == pytest.approx(30 * steps)
    assert generated == pytest.approx(10 * steps)

    def rates(name: str) -> list[float]:
        labels = {"model_name": "no-model"}
        value = llm.metrics.registry.get_sample_value
        return [value(f"tk:{name}_per_second", labels | {"engine": engine}) for engine in "01"]

    for name, total in (
        ("iterations", steps),
        ("computed_tokens", computed),
        ("generation_tokens", generated),
    ):
        assert rates(name) == pytest.approx([total / 4, total * 3 / 4])
        assert sum(rates(name)) == pytest.approx(total)


async def test_queries_and_statistics_cover_all_cores(scripted: Pair) -> None:
    llm, *cores = scripted
    for index, core in enumerate(cores):
        stats = EngineStats(num_running=1 + index, num_waiting=5, kv_cache_usage=0.2 + index)
        await core.say(EngineOutputs(stats=stats))
    assert (llm.stats.num_running, llm.stats.num_waiting) == (3, 10)
    assert llm.stats.kv_cache_usage == pytest.approx(0.7)

    asking = asyncio.create_task(llm.live_requests())
    await asyncio.sleep(0)
    for index, core in enumerate(cores):
        while not core.received:
            await asyncio.sleep(0)
        [query] = core.received
        assert isinstance(query, ListRequests)
        info = RequestInfo(f"of {index}", "running", float(index), 1, 0, 1, 1.0, 1, 0, 0, "")
        await core.say(RequestList(query.ticket, [info], 0.5 * index))
    found = await asking
    assert [one.id for one in found.requests] == ["of 1", "of 0"], "oldest first"
    assert found.kv_cache_usage == 0.25

    llm.reset_prefix_cache()
    assert all(isinstance(core.received[-1], ResetPrefixCache) for core in cores)


async def test_answers_without_a_seed_differ_between_cores(scripted: Pair) -> None:
    """Each core would otherwise draw the same seeds."""
    llm, *cores = scripted
    for i in range(4):
        llm.start_request(request(str(i)))
    requests = [one for core in cores for one in core.received if isinstance(one, EngineRequest)]
    seeds = {one.seed for one in requests}
    assert len(seeds) == 4
    assert None not in seeds
