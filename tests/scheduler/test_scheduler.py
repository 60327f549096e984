"""The scheduler under random arrivals, tiny pools, aborts and failing steps."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import (
    MAX_MODEL_LEN,
    STOP_TOKEN,
    VOCAB,
    Device,
    Plan,
    check_all_is_free,
    check_ownership,
    expected_answer,
    make_request,
    make_scheduler,
    run,
)
from toolkit.cache_group import ONE_GROUP, CacheGroup, most_pages, most_step
from toolkit.scheduler import FinishReason, ModelOutput, Request, RequestStatus, Scheduler
from toolkit.scheduler.blocks.block_pool import BlockPool
from toolkit.scheduler.blocks.block_tables import BlockTables, Cached
from toolkit.scheduler.request import NO_SLOT
from toolkit.scheduler.running import RunningRequests
from toolkit.scheduler.states import Snapshot, StateSlots
from toolkit.sequence import Feature

thorough = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


SEEN = {b"a": [(0, 3)], b"b": [(0, 2), (3, 1)], b"c": [(0, 5)], b"d": [(0, 1)]}
"""Runs of pictures, from the position of the first. The tokens of "c" see each other."""


def pictures(names: Sequence[bytes], prompt: list[int]) -> list[Feature]:
    """Return features one after the other, as far as they fit into a prompt."""
    found, at = [], 1
    for name in names:
        runs = tuple((at + first, count) for first, count in SEEN[name])
        if runs[-1][0] + runs[-1][1] <= len(prompt):
            found.append(Feature(name, runs, both_ways=name == b"c"))
            at = runs[-1][0] + runs[-1][1] + 1
    return found


def features(draw, prompt: list[int], digests: Sequence[bytes], *, hears: bool) -> list[Feature]:
    """Draw the clip of a prompt, or its pictures."""
    if hears:
        return [Feature(draw(st.sampled_from([b"x", b"y", b"z"])))]
    return pictures(draw(st.lists(st.sampled_from(digests), max_size=3)) if digests else [], prompt)


@st.composite
def groups(draw, index: int, caching: bool, digests: Sequence[bytes], *, hears: bool):
    """Draw a request, or siblings after their leader. Prompts often share a prefix."""
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
        "adapter": draw(st.sampled_from(["", "", "a", "b", "c"])),
        "features": features(draw, prompt, digests, hears=hears),
        "cacheable": caching or n > 1,
        "ignore_eos": draw(st.booleans()),
        "stop_token_ids": draw(st.sampled_from([None, [STOP_TOKEN]])),
        "is_final_only": draw(st.booleans()),
    }
    shape["min_tokens"] = draw(st.integers(0, min(3, shape["max_tokens"])))
    leader = make_request(f"{index}/0", prompt, seed=seed, **shape)
    siblings = [
        make_request(f"{index}/{i}", prompt, seed=seed + i, leader=leader, **shape)
        for i in range(1, n)
    ]
    return [leader, *siblings]


GROUPS = [
    ONE_GROUP,
    (CacheGroup(window=5),),
    (CacheGroup(), CacheGroup(window=7)),
    (CacheGroup(blocks_per_page=3), CacheGroup(window=6)),
    (CacheGroup(window=3, blocks_per_page=2), CacheGroup(chunk=6), CacheGroup(blocks_per_page=3)),
]


HEARING = [
    (CacheGroup(), CacheGroup(feature=6)),
    (CacheGroup(window=5), CacheGroup(feature=3, blocks_per_page=2)),
    (CacheGroup(blocks_per_page=3), CacheGroup(feature=11), CacheGroup(window=6)),
]
"""Groups of models whose tokens read a clip, too."""


@st.composite
def plans(draw, *, failing: bool = False, aborting: bool = True, seeing: bool = True):
    block_size = draw(st.sampled_from([1, 2, 4, 5]))
    caching = draw(st.booleans())
    count = draw(st.integers(1, 7))
    budget = draw(st.sampled_from([1, 3, 8, 16, 100]))
    num_snapshots = draw(st.sampled_from([None, None, None, 0, 2, 9]))
    choices = [*GROUPS, *HEARING] if seeing else GROUPS
    groups_of_layers = draw(st.sampled_from(choices)) if num_snapshots is None else ONE_GROUP
    hears = groups_of_layers in HEARING
    most_drafts = draw(st.sampled_from([0, 1, 3]))
    num_stages = draw(st.sampled_from([1, 1, 2, 3]))
    step = most_step(budget, most_drafts, num_stages)
    longest = most_pages(groups_of_layers, block_size, MAX_MODEL_LEN, step)
    fits = budget >= 5 and num_snapshots is None and not failing  # failures lower the budget
    digests = [b"a", b"b", b"d", *[b"c"] * fits] if seeing else []
    arrivals = [
        (draw(st.integers(0, 12)), draw(groups(index, caching, digests, hears=hears)))
        for index in range(count)
    ]
    plan = Plan(
        groups=groups_of_layers,
        block_size=block_size,
        num_blocks=longest + draw(st.integers(0, longest)),
        num_host_blocks=draw(st.sampled_from([0, 0, 3, longest, 3 * longest])),
        max_num_seqs=draw(st.integers(1, 6)),
        budget=budget,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=caching,
        depth=draw(st.sampled_from([1, 2, 2, 3])),
        num_stages=num_stages,
        most_drafts=most_drafts,
        max_loras=draw(st.integers(1, 3)),
        num_feature_pages=draw(st.integers(3, 6)),
        most_encoded=draw(st.sampled_from([1, 4, 20])),
        bytes_delay=draw(st.sampled_from([0, 0, 1, 4])) if seeing else 0,
        arrivals=arrivals,
    )
    if num_snapshots is not None:
        plan.num_state_slots = plan.max_num_seqs + num_snapshots
        plan.num_host_slots = draw(st.sampled_from([0, 1, plan.max_num_seqs]))
    plan.resets = draw(st.lists(st.integers(0, 40), max_size=2))
    names = [request.id for request in plan.requests]
    if aborting:
        plan.aborts = draw(
            st.lists(st.tuples(st.integers(0, 40), st.sampled_from(names)), max_size=3)
        )
    if failing:
        plan.failures = draw(
            st.dictionaries(st.integers(0, 40), st.sampled_from(["error", "memory"]), max_size=4)
        )
        plan.failing_requests = draw(
            st.dictionaries(st.sampled_from(names), st.integers(0, 6), max_size=2)
        )
    return plan


def check_answers(plan: Plan, allowed: set[FinishReason]) -> None:
    """Check that requests have the tokens of a run alone, up to where they were cut off."""
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
def test_every_request_gets_the_same_answer_as_alone(plan):
    run(plan)
    check_answers(plan, allowed=set())


@given(plan=plans())
@thorough
def test_aborts_free_all_blocks_and_affect_no_other_request(plan):
    run(plan)
    check_answers(plan, allowed={FinishReason.ABORT})
    aborted = {name for _, name in plan.aborts}
    assert {r.id for r in plan.requests if r.finish_reason is FinishReason.ABORT} <= aborted


@given(plan=plans(failing=True))
@thorough
def test_failing_steps_lose_no_block_and_change_no_answer(plan):
    run(plan)
    check_answers(plan, allowed={FinishReason.ABORT, FinishReason.ERROR})


@given(plan=plans(failing=True))
@settings(thorough, max_examples=10)
def test_runs_are_deterministic(plan):
    again = copy.deepcopy(plan)
    assert run(plan).trace == run(again).trace


def without_pages(step: tuple) -> tuple:
    """Return a step of a trace with the number of swapped pages in place of the pages."""
    rows, num_tokens, num_computed, swap_out, swap_in, *others = step
    return rows, num_tokens, num_computed, len(swap_out), len(swap_in), *others


@given(plan=plans(failing=True))
@thorough
def test_batch_scheduling_equals_single_scheduling(plan):
    """Holds without prefix caching: singly scheduled requests can find blocks of others earlier.

    Nor do groups free windows, which singly scheduled requests do in each step. Which pages a
    request has may differ: those for drafts come after all others.
    """
    assume(not any(group.frees for group in plan.groups))
    plan.caching = False
    plan.arrivals = [(turn, group[:1]) for turn, group in plan.arrivals]
    for request in plan.requests:
        request.cacheable = False
    again = copy.deepcopy(plan)
    again.schedules_singly = True
    together, singly = ([without_pages(step) for step in run(one).trace] for one in (plan, again))
    assert together == singly


def test_an_answer_that_grows_by_several_blocks_at_once_is_kept():
    """Drafts make rows grow past the block at which they used to keep their newest tokens."""
    requests = [
        make_request(f"{i}", [2 + i] * 3, max_tokens=36, ignore_eos=True, seed=i) for i in range(6)
    ]
    plan = Plan(block_size=1, num_blocks=400, max_num_seqs=6, most_drafts=3, budget=100)
    plan.arrivals = [(0, requests)]
    run(plan)
    check_answers(plan, allowed=set())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("is_final_only", [False, True])
def test_steady_decode_reports_only_columns(depth, is_final_only):
    """The first and the last of 28 tokens are reported singly."""
    requests = [
        make_request(
            f"{i}", [2 + i] * 8, max_tokens=28, ignore_eos=True, seed=i, is_final_only=is_final_only
        )
        for i in range(4)
    ]
    outcome = run(Plan(depth=depth, num_blocks=60, budget=100, arrivals=[(0, requests)]))
    assert outcome.num_batched == (0 if is_final_only else 26)


@pytest.mark.parametrize("block_size", [1, 4, 16, 48])
def test_an_answer_can_be_read_at_any_time_or_only_at_the_end(block_size):
    """The answer is longer than what a row keeps."""
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
    in_flight = deque()
    while scheduler.num_unfinished or in_flight:
        while len(in_flight) < 3 and (step := scheduler.schedule()) is not None:
            count = int(step.samples.sum())
            in_flight.append(
                (step, ModelOutput(step.step, np.full(count, step.step % 997, np.int32)))
            )
        step, result = in_flight.popleft()
        scheduler.update(step, result)
        expected.append(step.step % 997)
        assert watched.output_token_ids == expected
    assert len(expected) == 900
    assert unwatched.output_token_ids == expected


def leak_the_last_block(pool: BlockPool, blocks: Sequence[int], **options: bool) -> None:
    RELEASE(pool, blocks[:-1], **options)


def keep_the_hash(pool: BlockPool, block: int) -> None:
    pool._block_of.pop(pool._hash_of[block], None)


def share_without_counting(pool: BlockPool, blocks: Sequence[int]) -> None:
    for block in blocks:
        pool._free.pop(block, None)


def swap_in_without_releasing(tables: BlockTables, request: Request) -> list[tuple[int, int]]:
    copies = list(zip(request.host_blocks[0], request.blocks[0], strict=False))
    request.host_blocks = []
    return copies


def swap_out_in_another_order(tables: BlockTables, request: Request) -> list[tuple[int, int]]:
    blocks, hosts = zip(*SWAP_OUT(tables, request), strict=True)
    return list(zip(blocks, reversed(hosts), strict=True))


def swap_states_without_releasing(states: StateSlots, request: Request) -> tuple[int, int]:
    copy = request.host_slot, request.state_slot
    request.host_slot = NO_SLOT
    return copy


def swap_states_to_one_place(states: StateSlots, request: Request) -> tuple[int, int]:
    slot, _ = SWAP_STATE_OUT(states, request)
    return slot, 0


def release_only_blocks(running: RunningRequests, request: Request) -> None:
    running._blocks.release_host(request)


def begin_without_a_state(states: StateSlots, request: Request, cached: Cached) -> Any:
    return None, cached


def begin_with_what_is_not_written_yet(states: StateSlots, request: Request, cached: Cached) -> Any:
    states._step += 1
    try:
        return BEGIN_WITH(states, request, cached)
    finally:
        states._step -= 1


def free_what_is_read(states: StateSlots, snapshot: Snapshot) -> bool:
    return snapshot.written == states._step


def expect_no_drafts(states: StateSlots, *given: int, has_drafts: bool) -> None:
    STATE_SLOTS(states, *given, has_drafts=False)


def trim_by_computed_tokens(
    tables: BlockTables, requests: Sequence[Request], positions: Sequence[int], **more: bool
) -> None:
    TRIM(tables, requests, [one.num_computed_tokens for one in requests], **more)


def register_unknown_tokens(tables: BlockTables, request: Request) -> None:
    """Take a token that is not known yet for 9."""
    tokens = [*request.token_ids, *[9] * request.num_in_flight]
    twin = make_request("twin", tokens[: request.num_computed_tokens + 1])
    twin.num_computed_tokens, twin.blocks = request.num_computed_tokens, request.blocks
    twin.num_registered = request.num_registered
    REGISTER(tables, twin)


def hit_without_a_window(tables: BlockTables, g: int, hashes: Sequence[bytes], length: int) -> int:
    return length


def swap_holes_in(tables: BlockTables, request: Request) -> list[tuple[int, int]]:
    pairs = zip(request.host_blocks, request.blocks, strict=True)
    copies = [pair for both in pairs for pair in zip(*both, strict=False)]
    tables.release_host(request)
    return copies


def take_some_pages_for_all(tables: BlockTables, cached: Cached) -> bool:
    return not any(cached.tables[g] for g in tables._features)


def find_features_of_others(tables: BlockTables, g: int, request: Request) -> list[bytes]:
    return FEATURE_KEYS(tables, g, make_request("any", [2]))


def clips_in_turn() -> list[tuple[int, list[Request]]]:
    """Return requests, one after the other, whose clips and answers evict each other's pages."""
    requests = [
        make_request(
            f"{i}", [2 + i] * 6, max_tokens=18, ignore_eos=True, features=[Feature(digest)]
        )
        for i, digest in enumerate((b"x", b"y", b"z") * 2)
    ]
    return [(40 * i, [request]) for i, request in enumerate(requests)]


def conversations(count: int) -> list[tuple[int, list[Request]]]:
    """Return requests, and later some that go on after their answers."""
    firsts = [
        make_request(f"{i}", [2 + i] * 5, max_tokens=20 + i, ignore_eos=True, seed=i)
        for i in range(count)
    ]
    prompts = [request.prompt_token_ids + expected_answer(request)[0] for request in firsts]
    later = [make_request(f"{i} on", one, max_tokens=2) for i, one in enumerate(prompts)]
    return [(0, firsts), (60, later)]


def later_turns() -> list[tuple[int, list[Request]]]:
    """Return a long request, and later ones that begin with parts of it."""
    first = make_request("0", [2, 3] * 8, max_tokens=20, ignore_eos=True)
    tokens = first.prompt_token_ids + expected_answer(first)[0]
    others = [make_request(f"{n}", tokens[:n], max_tokens=4) for n in (30, 22, 14)]
    return [(0, [first]), *((40 + 20 * i, [one]) for i, one in enumerate(others))]


def turns_that_go_on_with(token: int) -> list[tuple[int, list[Request]]]:
    """Return requests that preempt each other, and others with a part of an answer and a token."""
    firsts = [
        make_request(f"{i}", [2 + i] * 8, max_tokens=30, ignore_eos=True, seed=i, priority=1)
        for i in range(4)
    ]
    tokens = [one.prompt_token_ids + expected_answer(one)[0] for one in firsts]
    prompts = [[*one[: n - 1], token, 2] for n in range(12, 36, 4) for one in tokens]
    later = [make_request(f"then {i}", one, max_tokens=1) for i, one in enumerate(prompts)]
    return [(0, firsts), *((n, [one]) for n, one in enumerate(later, 5))]


TRIM, REGISTER = BlockTables.trim, BlockTables.register
FEATURE_KEYS = BlockTables._feature_keys
CLIPS = {"groups": (CacheGroup(), CacheGroup(feature=15)), "num_blocks": 21}
WINDOWS = {"groups": (CacheGroup(), CacheGroup(window=5)), "num_blocks": 24}
BEGIN_WITH, STATE_SLOTS = StateSlots.begin_with, StateSlots.__init__
RELEASE, SWAP_OUT = BlockPool.release, BlockTables.swap_out
SWAP_STATE_OUT = StateSlots.swap_out
SWAPPED_STATES = {"num_state_slots": 9, "num_host_blocks": 40, "num_host_slots": 4}
MISTAKES: dict[str, tuple[type, str, Callable, dict[str, Any]]] = {
    "a block is not released": (BlockPool, "release", leak_the_last_block, {}),
    "a hash outlives its block": (BlockPool, "_evict", keep_the_hash, {}),
    "a sharer is not counted": (BlockPool, "share", share_without_counting, {}),
    "host blocks are not released": (
        BlockTables, "swap_in", swap_in_without_releasing, {"num_host_blocks": 40}
    ),
    "blocks are swapped to others' places": (
        BlockTables, "swap_out", swap_out_in_another_order, {"num_host_blocks": 40}
    ),
    "a state is expected in a cached block": (
        StateSlots, "begin_with", begin_without_a_state, {"num_state_slots": 9}
    ),
    "a snapshot is read by the step that writes it": (
        StateSlots, "begin_with", begin_with_what_is_not_written_yet, {"num_state_slots": 9}
    ),
    "a slot is written while another request reads it": (
        StateSlots, "_is_busy", free_what_is_read, {"num_state_slots": 4, "num_blocks": 40}
    ),
    "a snapshot counts as passed before its drafts are": (
        StateSlots, "__init__", expect_no_drafts,
        {
            "num_state_slots": 30, "num_blocks": 90, "most_drafts": 3, "depth": 2,
            "arrivals": conversations(5),
        },
    ),
    "the host's slots are not released": (
        StateSlots, "swap_in", swap_states_without_releasing, SWAPPED_STATES
    ),
    "a swapped request that is aborted keeps its slot": (
        RunningRequests, "release_host", release_only_blocks,
        SWAPPED_STATES | {"aborts": [(15, f"{i}") for i in range(5)]},
    ),
    "a swapped request of a dropped step keeps its slot": (
        RunningRequests, "release_host", release_only_blocks,
        SWAPPED_STATES | {"failures": {15: "error"}},
    ),
    "states are swapped to others' places": (
        StateSlots, "swap_out", swap_states_to_one_place, SWAPPED_STATES
    ),
    "a window is trimmed by tokens that may be wrong": (
        BlockTables, "trim", trim_by_computed_tokens,
        WINDOWS | {"block_size": 1, "num_blocks": 99, "most_drafts": 3, "depth": 3},
    ),
    "pages of unknown tokens are registered": (
        BlockTables, "register", register_unknown_tokens,
        WINDOWS
        | {
            "depth": 3, "max_num_seqs": 5, "policy": "priority",
            "arrivals": turns_that_go_on_with(9),
        },
    ),
    "a prefix is found whose window is lost": (
        BlockTables, "_covered", hit_without_a_window,
        WINDOWS | {"num_blocks": 40, "arrivals": later_turns()},
    ),
    "a clip is found that lost some of its pages": (
        BlockTables, "lacks_feature", take_some_pages_for_all, CLIPS | {"arrivals": clips_in_turn()}
    ),
    "a clip is found by another's name": (
        BlockTables, "_feature_keys", find_features_of_others, CLIPS | {"arrivals": clips_in_turn()}
    ),
    "a hole is swapped": (
        BlockTables, "swap_in", swap_holes_in, WINDOWS | {"num_host_blocks": 40}
    ),
    "snapshots of a dropped step are kept": (
        StateSlots, "clear", lambda states: None,
        {"num_state_slots": 9, "num_blocks": 40, "failures": {0: "error"}, "depth": 2},
    ),
}  # fmt: skip


FOUND = (
    "accounts are wrong|a row reads|a row continues another|a step reads a slot|slots are"
    "|is a copy target once"
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_in_the_accounts_are_found(monkeypatch, mistake):
    owner, name, wrong, settings = MISTAKES[mistake]
    requests = [
        make_request(f"{i}", [2] * 8 + [i] * 2, max_tokens=20, ignore_eos=True, seed=i)
        for i in range(5)
    ]
    late = 9
    settings = {"num_blocks": 12, "arrivals": [(0, requests[:4]), (late, requests[4:])]} | settings
    plan = Plan(**settings)
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises((AssertionError, RuntimeError), match=FOUND):
        run(plan)


@pytest.mark.parametrize("num_blocks", [12, 18, 20, 21, 22, 26])
def test_clips_that_lost_some_of_their_pages_are_computed_again(num_blocks):
    plan = Plan(**CLIPS | {"num_blocks": num_blocks, "arrivals": clips_in_turn()})
    run(plan)
    check_answers(plan, allowed=set())


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_host_blocks", [0, 40])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"most_drafts": 3},
        {"num_state_slots": 5, "num_host_slots": 1},
        {"num_state_slots": 5, "num_host_slots": 4},
    ],
    ids=str,
)
def test_a_tiny_pool_preempts_and_keeps_answers_right(depth, num_host_blocks, more):
    """Ensures that the properties above also cover preemption."""
    plan = Plan(
        **more,
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


@pytest.mark.parametrize("event", ["abort", "reset", "drop"])
def test_a_swapped_request_leaves_no_slot_behind(event):
    requests = [
        make_request(f"{i}", [2 + i] * 8, max_tokens=30, ignore_eos=True, seed=i) for i in range(4)
    ]
    plan = Plan(num_blocks=11, arrivals=[(0, requests)], **SWAPPED_STATES)
    scheduler, device, happened = make_scheduler(plan), Device(plan), False
    for request in requests:
        scheduler.add(request)
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        scheduler.update(step, device.execute(step))
        swapped = [one for one in requests if one.status is RequestStatus.SWAPPED]
        if swapped and not happened:
            happened = True
            assert swapped[0].host_slot != NO_SLOT
            if event == "abort":
                scheduler.abort(swapped[0].id)
            elif event == "reset":
                scheduler.reset_prefix_cache()
            else:
                scheduler.drop_steps_in_flight()
            assert (swapped[0].host_slot == NO_SLOT) == (event != "reset")
        check_ownership(scheduler)
    assert happened
    check_all_is_free(scheduler, plan)
    check_answers(plan, allowed={FinishReason.ABORT} if event == "abort" else set())


@given(plan=plans(aborting=False, seeing=False))
@thorough
def test_first_tokens_come_in_order_of_rank(plan):
    """Rank is arrival with fcfs, and priority then arrival with priority.

    All arrive together with priority. Siblings wait for their leader; others may overtake them.
    There is a slot for each adapter. Others overtake a request while its picture is encoded, and a
    prompt in several chunks if a pipeline's steps share the requests.
    """
    plan.max_loras, plan.num_stages = 3, 1
    if plan.policy == "priority":
        plan.arrivals = [(0, group) for _, group in plan.arrivals]
    plan.arrivals = sorted(
        ((turn, group[:1]) for turn, group in plan.arrivals), key=lambda arrival: arrival[0]
    )
    outcome = run(plan)
    check_answers(plan, allowed=set())
    rank = (
        (lambda r: (r.spec.priority, r.arrival))
        if plan.policy == "priority"
        else (lambda r: r.arrival)
    )
    turns = [outcome.first_token[request.id] for request in sorted(plan.requests, key=rank)]
    assert turns == sorted(turns)


def test_an_adapter_that_waits_gets_its_turn():
    """Requests with a full slot's adapter keep coming. Others, without one, are not held up."""
    plan = Plan(num_blocks=100, max_num_seqs=20, budget=100, max_loras=1)
    shape = {"max_tokens": 4, "ignore_eos": True}
    for turn in range(40):
        plan.arrivals.append((turn, [make_request(f"a{turn}", [2], adapter="a", **shape)]))
    plan.arrivals.append((5, [make_request("b", [2], adapter="b", **shape)]))
    plan.arrivals.append((6, [make_request("none", [2], **shape)]))
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert outcome.first_token["none"] == 6
    assert 6 < outcome.first_token["b"] < outcome.first_token["a7"] < 20


def test_an_aborted_request_leaves_its_turn_to_others():
    """The only slot is free when the first request that waited for it has been aborted."""
    scheduler = make_scheduler(Plan(num_blocks=100, max_loras=1))
    for name in "abc":
        scheduler.add(make_request(name, [2], adapter=name))
    step = scheduler.schedule()
    assert [new.spec.adapter.name for new in step.new_rows] == ["a"]
    for name in "ab":
        scheduler.abort(name)
    step = scheduler.schedule()
    assert [new.spec.adapter.name for new in step.new_rows] == ["c"]


@pytest.mark.parametrize("singly", [False, True])
def test_requests_that_decode_come_before_a_prompt_of_higher_rank(singly):
    plan = Plan(budget=4, num_blocks=40, policy="priority", schedules_singly=singly)
    scheduler = make_scheduler(plan)
    options = {"max_tokens": 30, "ignore_eos": True}
    for i in range(3):
        scheduler.add(make_request(f"{i}", [2 + i], priority=1, **options))
    finish(scheduler)
    scheduler.add(make_request("urgent", [9] * 20, **options))
    counts = [finish(scheduler) for _ in range(5)]
    assert counts[0] == [1, 1, 1, 1]  # admitted with what is left
    assert counts[1:] == [[1, 1, 1, 1]] * 4


def finish(scheduler: Scheduler) -> list[int]:
    """Schedule a step and end it; return its numbers of tokens."""
    step = scheduler.schedule()
    assert step is not None
    scheduler.update(step, ModelOutput(step.step, np.full(int(step.samples.sum()), 5, np.int32)))
    return step.num_tokens.tolist()


def test_with_priority_an_urgent_request_keeps_its_blocks():
    """If blocks run out, the least urgent request loses its blocks, however early it arrived."""
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
def test_only_the_faulty_request_fails(depth, budget, since):
    """Check this too when its prompt takes several steps, of which only the last one fails."""
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
        failing_requests={"2": since},
    )
    run(plan)
    check_answers(plan, allowed={FinishReason.ERROR})
    assert {r.id for r in requests if r.finish_reason is FinishReason.ERROR} == {"2"}


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_suspects_are_tried_without_a_running_leader(depth):
    """A suspected sibling computes its own prompt; a cleared suspect makes way for the next."""
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


def test_out_of_memory_halves_steps_and_keeps_answers_right():
    requests = [make_request(f"{i}", [2 + i] * 9, max_tokens=9, seed=i) for i in range(4)]
    plan = Plan(budget=32, num_blocks=40, arrivals=[(0, requests)], failures={0: "memory"})
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert outcome.scheduler.max_num_batched_tokens == 16
    assert outcome.scheduler.max_num_seqs == 2


def test_permanent_out_of_memory_ends_every_request():
    requests = [make_request(f"{i}", [2 + i] * 9, max_tokens=9, seed=i) for i in range(4)]
    plan = Plan(
        num_blocks=40, arrivals=[(0, requests)], failures=dict.fromkeys(range(1000), "memory")
    )
    run(plan)
    assert {request.finish_reason for request in requests} == {FinishReason.ERROR}


def test_a_request_larger_than_the_cache_is_refused():
    scheduler = Scheduler(
        num_blocks=3,
        block_size=4,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        max_model_len=MAX_MODEL_LEN,
    )
    with pytest.raises(
        ValueError, match="needs up to 13 tokens of KV cache, in 4 pages, and all of it has 3"
    ):
        scheduler.add(make_request("0", [2] * 7, max_tokens=6))
    assert scheduler.num_unfinished == 0


@pytest.mark.parametrize("num_state_slots", [0, 4, 8])
def test_siblings_wait_for_their_leader_and_then_share_its_prompt(num_state_slots):
    leader = make_request("0/0", [2] * 17, max_tokens=8, ignore_eos=True)
    others = [
        make_request(f"0/{i}", [2] * 17, max_tokens=8, ignore_eos=True, leader=leader, seed=i)
        for i in (1, 2)
    ]
    plan = Plan(
        budget=6, num_blocks=40, num_state_slots=num_state_slots, arrivals=[(0, [leader, *others])]
    )
    outcome = run(plan)
    check_answers(plan, allowed=set())
    assert [request.num_cached_tokens for request in (leader, *others)] == [0, 16, 16]
    assert outcome.first_token["0/0"] <= outcome.first_token["0/1"]


@pytest.mark.parametrize("overlaps", [False, True])
def test_an_answer_keeps_the_newest_state_that_it_has_passed(overlaps):
    request = make_request("0", [2] * 6, max_tokens=90, ignore_eos=True)
    states = StateSlots(9, grain=4, block_size=4, has_drafts=False)
    states.begin_step(0)
    states.enter(request, None)
    assert states.keep(request, 0, 6) is not None  # at 4: the prompt's end
    request.schedule(6, 1)
    for step in range(1, 40):
        if step > 1 or not overlaps:
            request.append(3)
        states.begin_step(step)
        states.keep(request, request.num_tokens - 1, request.num_tokens)
        request.schedule(1, 1)
    assert len(states._free) == 9 - 3  # its own, the prompt's end, and the newest


def test_the_scheduler_imports_no_torch():
    code = (
        "import sys, toolkit.scheduler; "
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("name", "budget", "message"),
    [
        (b"a", 100, "needs 2 pages of the encoder cache, which has 1"),
        (b"c", 4, "has 5 tokens that see each other, and a step has at most 4"),
    ],
)
def test_pictures_that_never_fit_are_refused(name: bytes, budget: int, message: str) -> None:
    prompt = [2] * 12
    request = make_request("one", prompt, features=pictures([name], prompt))
    pages = 1 if name == b"a" else 9
    scheduler = make_scheduler(Plan(num_feature_pages=pages, budget=budget))
    with pytest.raises(ValueError, match=message):
        scheduler.add(request)


def test_an_encoder_runs_a_step_before_its_prompt_and_once_for_two() -> None:
    """Others decode meanwhile. A step encodes no more than allowed, or one picture."""
    prompt = [2 + i % 9 for i in range(20)]
    both = [make_request(name, prompt, features=pictures([b"a", b"b"], prompt)) for name in "xy"]
    plan = Plan(num_blocks=40, num_feature_pages=8, most_encoded=4, budget=100)
    scheduler = make_scheduler(plan)
    for request in both:
        scheduler.add(request)
    found = []
    for _ in range(4):
        step = scheduler.schedule()
        found.append((step.num_tokens.tolist(), [load.digest for load in step.loads]))
        tokens = np.full(int(step.samples.sum()), 3, np.int32)
        scheduler.update(step, ModelOutput(step.step, tokens))
    assert found == [
        ([1, 1], [b"a"]),
        ([4, 4], [b"b"]),
        ([15, 15], []),
        ([1, 1], []),
    ]


@pytest.mark.parametrize("out_of_memory", [False, True])
def test_an_encoder_that_fails_ends_the_request_of_its_picture(out_of_memory: bool) -> None:
    """Another request of the step goes on. That of the picture has no row yet."""
    prompt = [2] * 12
    seeing = make_request("seeing", prompt, features=[Feature(b"a", ((0, 3),))])
    scheduler = make_scheduler(Plan(num_blocks=40, budget=100))
    scheduler.add(seeing)
    scheduler.add(other := make_request("other", [2] * 3))
    for _ in range(60):
        step = scheduler.schedule()
        if step.loads:
            scheduler.recover(step, out_of_memory=out_of_memory)
            continue
        assert step.rows.tolist()
        scheduler.update(
            step, ModelOutput(step.step, np.full(int(step.samples.sum()), 3, np.int32))
        )
        if not scheduler.num_unfinished:
            break
    assert seeing.finish_reason is FinishReason.ERROR
    assert other.finish_reason is FinishReason.LENGTH
