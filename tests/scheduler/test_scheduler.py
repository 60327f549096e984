"""The scheduler under random arrivals, tiny pools, aborts and failing steps, checked against a cache that knows its content."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import deque

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import (
    MAX_MODEL_LEN,
    STOP_TOKEN,
    VOCAB,
    Plan,
    expected_answer,
    make_request,
    run,
)
from toolkit.scheduler import FinishReason, ModelOutput, Scheduler

thorough = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def groups(draw, index: int, caching: bool):
    """A request, or siblings of one prompt behind their leader. Prompts often begin alike."""
    trunk = [2 + i % (VOCAB - 2) for i in range(24)]
    shared = draw(st.integers(0, 24))
    own = draw(st.lists(st.integers(0, VOCAB - 1), min_size=0 if shared else 1, max_size=12))
    prompt = (trunk[:shared] + own)[: MAX_MODEL_LEN - 4]
    n = draw(st.sampled_from([1, 1, 1, 2, 3]))
    seed = draw(st.integers(0, 3))
    shape = {
        "max_tokens": draw(st.integers(1, MAX_MODEL_LEN - len(prompt))),
        "priority": draw(st.integers(0, 2)),
        "salt": draw(st.sampled_from(["", "", "other"])) if caching else f"only {index}",
        "cacheable": caching or n > 1,
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([None, [STOP_TOKEN]])),
        "whole": draw(st.booleans()),
    }
    shape["min_tokens"] = draw(st.integers(0, min(3, shape["max_tokens"])))
    leader = make_request(f"{index}/0", prompt, seed=seed, **shape)
    siblings = [
        make_request(f"{index}/{i}", prompt, seed=seed + i, leader=leader, **shape)
        for i in range(1, n)
    ]
    return [leader, *siblings]


@st.composite
def plans(draw, *, failing: bool = False, aborting: bool = True):
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    longest = -(-MAX_MODEL_LEN // block_size)
    caching = draw(st.booleans())
    count = draw(st.integers(1, 7))
    arrivals = [(draw(st.integers(0, 12)), draw(groups(index, caching))) for index in range(count)]
    plan = Plan(
        block_size=block_size,
        num_blocks=longest + draw(st.integers(0, longest)),
        num_host_blocks=draw(st.sampled_from([0, 0, 3, longest, 3 * longest])),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=draw(st.sampled_from([1, 3, 8, 16, 100])),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=caching,
        depth=draw(st.sampled_from([1, 2, 2, 3])),
        num_stages=draw(st.sampled_from([1, 1, 2, 3])),
        arrivals=arrivals,
    )
    names = [request.id for request in plan.requests]
    if aborting:
        plan.aborts = draw(
            st.lists(st.tuples(st.integers(0, 40), st.sampled_from(names)), max_size=3)
        )
    if failing:
        plan.failures = draw(
            st.dictionaries(st.integers(0, 40), st.sampled_from(["error", "memory"]), max_size=4)
        )
        plan.poison = draw(st.dictionaries(st.sampled_from(names), st.integers(0, 6), max_size=2))
    return plan


def check_answers(plan: Plan, allowed: set[FinishReason]) -> None:
    """Every request has the tokens it would have had alone, up to where it was cut off."""
    for request in plan.requests:
        tokens, reason, stop = expected_answer(request)
        assert request.is_finished
        if request.finish_reason in allowed:
            assert request.output_token_ids == tokens[: len(request.output_token_ids)]
        else:
            assert (request.output_token_ids, request.finish_reason) == (tokens, reason)
            assert request.stop_reason == stop


@given(plan=plans(aborting=False))
@thorough
def test_every_request_gets_the_answer_it_would_have_had_alone(plan):
    run(plan)
    check_answers(plan, allowed=set())


@given(plan=plans())
@thorough
def test_aborts_free_everything_and_disturb_nobody(plan):
    run(plan)
    check_answers(plan, allowed={FinishReason.ABORT})
    aborted = {name for _, name in plan.aborts}
    assert {r.id for r in plan.requests if r.finish_reason is FinishReason.ABORT} <= aborted


@given(plan=plans(failing=True))
@thorough
def test_failing_steps_lose_no_block_and_spoil_no_answer(plan):
    run(plan)
    check_answers(plan, allowed={FinishReason.ABORT, FinishReason.ERROR})


@given(plan=plans(failing=True))
@settings(thorough, max_examples=30)
def test_the_same_script_gives_the_same_steps(plan):
    again = copy.deepcopy(plan)
    assert run(plan).trace == run(again).trace


@given(plan=plans(failing=True))
@thorough
def test_scheduling_together_is_scheduling_one_by_one(plan):
    """As long as nobody finds another's blocks, which those who are scheduled one by one can find sooner."""
    plan.caching = False
    plan.arrivals = [(turn, group[:1]) for turn, group in plan.arrivals]
    for request in plan.requests:
        request.cacheable = False
    again = copy.deepcopy(plan)
    again.one_by_one = True
    assert run(plan).trace == run(again).trace


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_in_steady_decode_nobody_is_told_of_singly(depth, whole):
    """Of 28 tokens, the first comes alone, and the last."""
    requests = [
        make_request(f"{i}", [2 + i] * 8, max_tokens=28, ignore_eos=True, seed=i, whole=whole)
        for i in range(4)
    ]
    outcome = run(Plan(depth=depth, num_blocks=60, budget=100, arrivals=[(0, requests)]))
    assert outcome.num_batched == (0 if whole else 26)


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_an_answer_can_be_read_at_any_time_and_only_at_the_end(block_size):
    """Longer than what a row keeps."""
    scheduler = Scheduler(
        num_blocks=3000 // block_size,
        block_size=block_size,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_model_len=1000,
    )
    watched, unwatched = (
        make_request(name, [2] * 5, max_tokens=900, eos_token_ids=())
        for name in ("watched", "unwatched")
    )
    expected: list[int] = []
    for request in (watched, unwatched):
        scheduler.add(request)
    flying = deque()
    while scheduler.num_unfinished or flying:
        while len(flying) < 3 and (step := scheduler.schedule()) is not None:
            count = int(step.samples.sum())
            flying.append((step, ModelOutput(step.step, np.full(count, step.step % 997, np.int32))))
        step, result = flying.popleft()
        scheduler.update(step, result)
        expected.append(step.step % 997)
        assert watched.output_token_ids == expected
    assert len(expected) == 900
    assert unwatched.output_token_ids == expected


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
def test_a_tiny_pool_preempts_and_all_finish_right(depth, num_host_blocks):
    """So that the properties above are not about pools where nothing happens."""
    plan = Plan(
        num_blocks=11,
        num_host_blocks=num_host_blocks,
        depth=depth,
        caching=False,
        arrivals=[
            (
                0,
                [
                    make_request(
                        f"{i}", [2 + i] * 8, max_tokens=30, ignore_eos=True, seed=i, cacheable=False
                    )
                    for i in range(4)
                ],
            )
        ],
    )
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert outcome.num_preemptions > 0
    assert (outcome.num_swaps > 0) == (num_host_blocks > 0)


@given(plan=plans(aborting=False))
@settings(thorough, max_examples=60)
def test_first_tokens_come_in_order_of_rank(plan):
    """fcfs: of arrival. priority: of priority, then arrival, when all arrive together. Siblings wait for their leader, and
    others may pass them meanwhile.
    """
    if plan.policy == "priority":
        plan.arrivals = [(0, group) for _, group in plan.arrivals]
    plan.arrivals = sorted(
        ((turn, group[:1]) for turn, group in plan.arrivals), key=lambda arrival: arrival[0]
    )
    outcome = run(plan)
    rank = (
        (lambda r: (r.spec.priority, r.arrival))
        if plan.policy == "priority"
        else (lambda r: r.arrival)
    )
    turns = [outcome.first_token[request.id] for request in sorted(plan.requests, key=rank)]
    assert turns == sorted(turns)


def test_under_priority_a_later_more_urgent_request_keeps_its_blocks():
    """When blocks run out, the least urgent one gives up its own, however early it came."""
    patient = make_request("patient", [2] * 12, max_tokens=28, ignore_eos=True, priority=5)
    urgent = make_request("urgent", [3] * 12, max_tokens=28, ignore_eos=True, priority=1)
    plan = Plan(
        num_blocks=12,
        policy="priority",
        arrivals=[(0, [patient]), (3, [urgent])],
        caching=False,
        depth=2,
    )
    run(plan)
    assert patient.num_preemptions > 0
    assert urgent.num_preemptions == 0
    check_answers(plan, allowed=set())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [4, 16, 100])
@pytest.mark.parametrize("since", [0, 3])
def test_a_poisonous_request_fails_alone(depth, budget, since):
    """Also when its prompt takes several steps, of which only the last one fails."""
    requests = [
        make_request(f"{i}", [2 + i] * (5 + 3 * i), max_tokens=20, ignore_eos=True, seed=i)
        for i in range(5)
    ]
    plan = Plan(
        depth=depth,
        budget=budget,
        num_blocks=60,
        max_num_seqs=8,
        arrivals=[(0, requests)],
        poison={"2": since},
    )
    run(plan)
    check_answers(plan, allowed={FinishReason.ERROR})
    assert {r.id for r in requests if r.finish_reason is FinishReason.ERROR} == {"2"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_are_tried_even_when_their_leader_is_not_running(depth):
    """A sibling under suspicion computes its own prompt, and one acquitted gives way to the next."""
    leader = make_request("0/0", [2] * 10, max_tokens=20, ignore_eos=True)
    siblings = [
        make_request(f"0/{i}", [2] * 10, max_tokens=20, ignore_eos=True, leader=leader, seed=i)
        for i in (1, 2)
    ]
    plan = Plan(
        depth=depth,
        budget=4,
        num_blocks=9,
        arrivals=[(0, [leader, *siblings])],
        failures=dict.fromkeys(range(3, 60, 9), "error"),
    )
    run(plan)
    check_answers(plan, allowed={FinishReason.ERROR})


def test_out_of_memory_halves_the_step_and_all_finish_right():
    requests = [make_request(f"{i}", [2 + i] * 9, max_tokens=9, seed=i) for i in range(4)]
    plan = Plan(budget=32, num_blocks=40, arrivals=[(0, requests)], failures={0: "memory"})
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert outcome.scheduler.max_num_batched_tokens == 16
    assert outcome.scheduler.max_num_seqs == 2


def test_memory_that_is_never_enough_ends_every_request_with_an_error():
    requests = [make_request(f"{i}", [2 + i] * 9, max_tokens=9, seed=i) for i in range(4)]
    plan = Plan(
        num_blocks=40, arrivals=[(0, requests)], failures=dict.fromkeys(range(1000), "memory")
    )
    run(plan)
    assert {request.finish_reason for request in requests} == {FinishReason.ERROR}


def test_a_request_larger_than_the_whole_cache_is_refused_at_once():
    scheduler = Scheduler(
        num_blocks=3,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=MAX_MODEL_LEN,
    )
    with pytest.raises(
        ValueError, match="needs up to 13 tokens of KV cache and all of it holds 12"
    ):
        scheduler.add(make_request("0", [2] * 7, max_tokens=6))
    assert scheduler.num_unfinished == 0


def test_siblings_wait_for_their_leader_and_then_share_its_prompt():
    leader = make_request("0/0", [2] * 17, max_tokens=8, ignore_eos=True)
    others = [
        make_request(f"0/{i}", [2] * 17, max_tokens=8, ignore_eos=True, leader=leader, seed=i)
        for i in (1, 2)
    ]
    plan = Plan(budget=6, num_blocks=40, arrivals=[(0, [leader, *others])])
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert [request.num_cached_tokens for request in (leader, *others)] == [0, 16, 16]
    assert outcome.first_token["0/0"] <= outcome.first_token["0/1"]


def test_the_scheduler_needs_no_torch():
    code = "import sys, toolkit.scheduler; assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
