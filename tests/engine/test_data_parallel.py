"""AsyncLLM over several cores: their tokens, and what becomes of requests when a core dies or is gone for good."""

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
    Forgotten,
    ListRequests,
    Pong,
    RequestInfo,
    RequestList,
    ResetPrefixCache,
)
from toolkit.errors import EngineDeadError, ServerUnavailableError
from toolkit.scheduler.stats import EngineStats

NEW_TOKENS = 12


@pytest.mark.parametrize(("name", "tensor"), [("gpt2", 1), ("llama3-gqa", 2), ("qwen3", 1)])
async def test_greedy_tokens_and_log_probabilities_of_both_engines_are_those_of_transformers(
    checkpoint, name, tensor
):
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
        assert [info.world_size for info in (one.info for one in llm.replicas)] == [tensor] * 2
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
    """An engine of two cores that say what the test has them say."""
    llm, cores = AsyncLLM("no-model"), (ScriptedCore(), ScriptedCore())

    class Inputs:
        tokenizer = None

    llm.attach([(core, INFO) for core in cores], Inputs())
    for index in range(2):
        llm.read(index)
    yield llm, *cores
    await llm.shutdown()


def numbers(core: ScriptedCore) -> list[int]:
    return [message.number for message in core.told if isinstance(message, EngineRequest)]


async def test_requests_of_a_core_that_died_go_on_with_the_other_at_once(scripted: Pair) -> None:
    llm, first, second = scripted
    streams = [llm.begin(request(str(i), prompt=[i] * 20, n=2)) for i in range(4)]
    assert len(numbers(first)) == len(numbers(second)) == 2
    [lost] = [streams[i] for i in range(4) if numbers(first)[0] == streams[i].request.number]
    number = lost.request.number
    await first.say(EngineOutputs([EngineOutput(number, [5]), EngineOutput(number + 1, [6])]))
    before = numbers(second)
    second.told.clear()
    llm.pause(0)
    rest = [message for message in second.told if isinstance(message, EngineRequest)]
    assert [
        (one.number, one.output_token_ids) for one in rest if one.number in (number, number + 1)
    ] == [
        (number, [5]),
        (number + 1, [6]),
    ]
    assert len(rest) == 4, "both answers of both requests"
    assert all(one.num_sequences == 1 and one.number not in before for one in rest)
    lost.close()
    assert second.told[-1] == Abort([number, number + 1], 0)

    third = ScriptedCore()
    llm.resume(0, third, INFO)
    assert third.told == [], "nobody waited for it"
    llm.begin(request("late"))
    assert len(third.told) == 1, "it has the least to do"


async def test_cores_that_die_together_are_one_death_of_each_request() -> None:
    llm, cores = AsyncLLM("no-model"), [ScriptedCore() for _ in range(4)]

    class Inputs:
        tokenizer = None

    llm.attach([(core, INFO) for core in cores], Inputs())
    streams = [llm.begin(request(str(i), prompt=[i] * 20)) for i in range(8)]
    llm.pause(0, 1, 2)
    assert len(numbers(cores[3])) == 8
    assert max(stream.num_deaths for stream in streams) == 1
    llm.pause(1)  # told once more
    assert max(stream.num_deaths for stream in streams) == 1
    await llm.shutdown()


async def test_what_moved_to_another_core_is_no_prompt_to_compute_for_ever(scripted: Pair) -> None:
    llm, first, second = scripted
    stream = llm.begin(request("long", prompt=list(range(4000))))
    index = 0 if numbers(first) else 1
    core = (first, second)[index]
    await core.say(EngineOutputs([EngineOutput(stream.request.number, [5])]))
    llm.pause(index)
    llm.resume(index, ScriptedCore(), INFO)
    for i in range(4):
        llm.begin(request(str(i), prompt=[i] * 20))
    moved = (first, second)[1 - index]
    assert len(numbers(moved)) > 1, "what is left of an answer does not keep others away"


async def test_a_core_that_fails_its_requests_is_passed_over(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would look idle, and get all of them."""
    llm, first, second = scripted
    # Else it is trusted again after five seconds, which the loop below may take on a busy machine.
    monkeypatch.setattr(replica, "HUNG", 1e9)
    for i in range(20):
        stream = llm.begin(request(str(i), prompt=[i] * 20))
        if stream.request.number in numbers(first):
            failed = EngineOutput(stream.request.number, [], finish_reason="error", error="no luck")
            await first.say(EngineOutputs([failed]))
    assert len(numbers(first)) <= replica.FAILURES
    assert len(numbers(second)) >= 17


async def test_a_core_that_hangs_is_passed_over_though_nobody_asks_for_its_health(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, first, second = scripted
    known = list(range(400))
    stuck = llm.begin(request("stuck", prompt=known))
    silent, other = (first, second) if numbers(first) else (second, first)
    monkeypatch.setattr(replica, "HUNG", -1.0)
    await other.say(Pong())
    stuck.close()
    for i in range(3):
        llm.begin(request(str(i), prompt=known))
        await other.say(Pong())
    assert (len(numbers(silent)), len(numbers(other))) == (1, 3)


async def test_what_a_core_has_forgotten_is_known_of_it_no_more(scripted: Pair) -> None:
    """Whichever front end had it do so."""
    llm, first, second = scripted
    known = list(range(400))
    llm.begin(request("one", prompt=known)).close()
    home, other = (first, second) if numbers(first) else (second, first)
    busy = llm.begin(request("two", prompt=known))
    await home.say(EngineOutputs([EngineOutput(busy.request.number, [5])]))
    assert len(numbers(home)) == 2
    await home.say(Forgotten())
    llm.begin(request("three", prompt=known))
    assert len(numbers(other)) == 1


async def test_requests_wait_when_no_core_runs_and_go_on_with_the_first_that_comes(
    scripted: Pair,
) -> None:
    llm, *before = scripted
    llm.begin(request("one"))
    for index, core in enumerate(before):
        llm.pause(index)
        core.told.clear()
    llm.begin(request("meanwhile"))
    third = ScriptedCore()
    llm.resume(1, third, INFO)
    assert numbers(third) == [0, 1]
    assert [core.told for core in before] == [[], []]


async def test_what_a_dead_core_had_still_to_say_is_not_heard(scripted: Pair) -> None:
    llm, first, second = scripted
    stream = llm.begin(request("one"))
    core, index = (first, 0) if numbers(first) else (second, 1)
    llm.pause(index)
    core._says.put_nowait(EngineOutputs([EngineOutput(stream.request.number, [5])]))
    for _ in range(5):
        await asyncio.sleep(0)
    assert stream.state.sequences[0].token_ids == []


async def test_a_server_goes_on_without_an_engine_that_is_gone_and_says_so(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, _, second = scripted
    monkeypatch.setattr(replica, "FRESH", 1e9)
    for core in scripted[1:]:
        await core.say(EngineOutputs(stats=EngineStats(num_sampled=1)))
    await llm.check()
    llm.pause(0)
    await llm.check()  # one that is being started again is missed by nobody
    await llm.check_some()
    llm.lose(0, EngineDeadError("Engine 0: out of everything."))
    with pytest.raises(EngineDeadError, match="Engine 0: out of everything"):
        await llm.check()
    await llm.check_some()
    llm.begin(request("one"))
    assert len(numbers(second)) == 1
    assert not llm.died.is_set()

    llm.pause(1)
    with pytest.raises(ServerUnavailableError, match="being started again"):
        await llm.live_requests()
    llm.lose(1, EngineDeadError("Engine 1: the same."))
    assert llm.died.is_set()
    with pytest.raises(EngineDeadError, match="Engine 1"):
        llm.begin(request("two"))


async def test_one_engine_whose_steps_fail_is_named(
    scripted: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, first, second = scripted
    monkeypatch.setattr(replica, "FRESH", 1e9)
    await first.say(Pong())
    await second.say(Pong("no memory"))
    with pytest.raises(ServerUnavailableError, match="Engine 1's steps fail: no memory"):
        await llm.check()
    await llm.check_some()


async def test_each_engine_has_a_throughput_of_its_own(scripted: Pair) -> None:
    llm, first, second = scripted
    llm.metrics.observe_throughput()
    await asyncio.sleep(0.01)
    for core, num_steps in ((first, 1), (second, 3)):
        for _ in range(num_steps):
            await core.say(EngineOutputs(stats=EngineStats(num_tokens=30, num_sampled=10)))
    steps, computed, generated = llm.metrics.observe_throughput()
    assert computed == pytest.approx(30 * steps)
    assert generated == pytest.approx(10 * steps)

    def told(name: str) -> list[float]:
        labels = {"model_name": "no-model"}
        value = llm.metrics.registry.get_sample_value
        return [value(f"tk:{name}_per_second", labels | {"engine": engine}) for engine in "01"]

    for name, total in (
        ("iterations", steps),
        ("computed_tokens", computed),
        ("generation_tokens", generated),
    ):
        assert told(name) == pytest.approx([total / 4, total * 3 / 4])
        assert sum(told(name)) == pytest.approx(total)


async def test_questions_and_figures_are_of_all_cores(scripted: Pair) -> None:
    llm, *cores = scripted
    for index, core in enumerate(cores):
        stats = EngineStats(num_running=1 + index, num_waiting=5, kv_cache_usage=0.2 + index)
        await core.say(EngineOutputs(stats=stats))
    assert (llm.stats.num_running, llm.stats.num_waiting) == (3, 10)
    assert llm.stats.kv_cache_usage == pytest.approx(0.7)

    asking = asyncio.create_task(llm.live_requests())
    await asyncio.sleep(0)
    for index, core in enumerate(cores):
        while not core.told:
            await asyncio.sleep(0)
        [question] = core.told
        assert isinstance(question, ListRequests)
        info = RequestInfo(f"of {index}", "running", float(index), 1, 0, 1, 1.0, 1, 0, 0, "")
        await core.say(RequestList(question.ticket, [info], 0.5 * index))
    found = await asking
    assert [one.id for one in found.requests] == ["of 1", "of 0"], "the oldest first"
    assert found.kv_cache_usage == 0.25

    llm.reset_prefix_cache()
    assert all(isinstance(core.told[-1], ResetPrefixCache) for core in cores)


async def test_answers_without_a_seed_differ_between_cores(scripted: Pair) -> None:
    """Each core by itself would begin with the same."""
    llm, *cores = scripted
    for i in range(4):
        llm.begin(request(str(i)))
    requests = [one for core in cores for one in core.told if isinstance(one, EngineRequest)]
    seeds = {one.seed for one in requests}
    assert len(seeds) == 4
    assert None not in seeds
