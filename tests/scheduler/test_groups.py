"""Groups of layers that free their windows: what stays in the prefix cache, and what fits."""

from __future__ import annotations

import pytest

from tests.scheduler.simulation import (
    MAX_MODEL_LEN,
    Device,
    Plan,
    expected_answer,
    make_request,
    make_scheduler,
    run,
)
from toolkit.cache_group import ONE_GROUP, CacheGroup, most_pages, most_step
from toolkit.scheduler import Request
from toolkit.sequence import Feature

WINDOW = (CacheGroup(), CacheGroup(window=7))
UNEVEN = (CacheGroup(blocks_per_page=2), CacheGroup(window=5))
CHUNKS = (CacheGroup(), CacheGroup(chunk=8))


def one_by_one(plan: Plan, *requests: Request) -> list[int]:
    """Run requests one after the other. Return how many tokens of each were cached."""
    plan.arrivals = [(50 * i, [request]) for i, request in enumerate(requests)]
    run(plan)
    return [request.num_cached_tokens for request in requests]


@pytest.mark.parametrize("groups", [WINDOW, UNEVEN, CHUNKS])
def test_a_prompt_and_the_next_turn_are_found_after_a_long_answer(groups):
    trunk = [2, 3, 4, 5] * 4
    first = make_request("first", [*trunk, 6], max_tokens=16, ignore_eos=True)
    after = first.prompt_token_ids + expected_answer(first)[0]
    again = make_request("again", [*trunk, 6], max_tokens=3, ignore_eos=True)
    on = make_request("on", after, max_tokens=3, ignore_eos=True)
    # The last token of an answer is not computed.
    assert one_by_one(Plan(groups=groups, num_blocks=60), first, again, on) == [0, 16, 32]


def test_prompts_that_part_share_what_is_before_from_the_third_on():
    trunk = [2, 3, 4, 5] * 4
    requests = [
        make_request(f"{i}", [*trunk, *[5 + i] * 12], max_tokens=6, ignore_eos=True)
        for i in range(4)
    ]
    # Nothing kept the window before the branch until the second found that others part there.
    assert one_by_one(Plan(groups=WINDOW, num_blocks=60), *requests) == [0, 0, 16, 16]


def test_pages_outside_windows_are_reused_before_others():
    """A long answer takes few pages from what others have left in the cache."""
    first = make_request("first", [2] * 9, max_tokens=1)
    long = make_request("long", [3] * 8, max_tokens=30, ignore_eos=True)
    again = make_request("again", [2] * 9, max_tokens=1)
    # The long one has 10 pages, and 3 of its window at a time.
    assert one_by_one(Plan(groups=WINDOW, num_blocks=20), first, long, again) == [0, 0, 8]


@pytest.mark.parametrize("depth", [1, 2])
def test_siblings_find_the_prompt_of_a_leader_that_is_far_ahead(depth):
    leader = make_request("0", [2] * 17, max_tokens=20, ignore_eos=True)
    siblings = [
        make_request(f"{i}", [2] * 17, max_tokens=20, ignore_eos=True, leader=leader, seed=i)
        for i in range(1, 4)
    ]
    plan = Plan(groups=WINDOW, num_blocks=60, max_num_seqs=1, depth=depth)
    plan.arrivals = [(0, [leader, *siblings])]
    scheduler, device = make_scheduler(plan), Device(plan)
    for request in plan.requests:
        scheduler.add(request)
    held = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        held.append(leader.num_blocks)
        scheduler.update(step, device.execute(step))
    assert [one.num_cached_tokens for one in siblings] == [16] * 3
    assert max(held) > 10 + 4, "the leader keeps its prompt's window while siblings wait"


@pytest.mark.parametrize("groups", [WINDOW, UNEVEN, CHUNKS])
@pytest.mark.parametrize("budget", [3, 16, 100])
def test_a_request_holds_its_windows_and_never_more_than_was_counted(groups, budget):
    plan = Plan(groups=groups, budget=budget, num_blocks=60)
    request = make_request("0", [2] * 20, max_tokens=20, ignore_eos=True)
    scheduler, device = make_scheduler(plan), Device(plan)
    scheduler.add(request)
    held = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        held.append(request.num_blocks)
        scheduler.update(step, device.execute(step))
    most = most_pages(groups, plan.block_size, MAX_MODEL_LEN, most_step(budget))
    assert max(held) <= most
    pages = -(-39 // (plan.block_size * groups[0].blocks_per_page))
    assert held[-1] <= pages + most_pages(groups[1:], plan.block_size, MAX_MODEL_LEN, 3)
    too_small = make_scheduler(Plan(groups=groups, budget=budget, num_blocks=most - 1))
    with pytest.raises(ValueError, match=f"in {most} pages, and all of it has {most - 1}"):
        too_small.add(make_request("1", [2] * 20, max_tokens=20))


def test_a_clip_whose_bytes_do_not_come_holds_up_no_other():
    plan = Plan(groups=(CacheGroup(), CacheGroup(feature=6)), num_blocks=60, most_encoded=12)
    scheduler = make_scheduler(plan)
    scheduler.needs.has_bytes = lambda request, feature: feature.digest != b"x"
    for name in ("x", "y", "z", "w"):
        scheduler.add(make_request(name, [2], features=[Feature(name.encode())]))
    [first, second] = scheduler.schedule().new_rows
    assert [new.spec.features[0].digest for new in (first, second)] == [b"y", b"z"]
    scheduler.needs.has_bytes = lambda request, feature: True
    found = [new.spec.features[0].digest for new in scheduler.schedule().new_rows]
    assert found == [b"x", b"w"], "in order of arrival"


@pytest.mark.parametrize("groups", [ONE_GROUP, WINDOW])
def test_a_leader_is_swapped_while_its_siblings_wait(groups):
    first = make_request("first", [2] * 12, max_tokens=28, ignore_eos=True)
    leader = make_request("0", [3] * 12, max_tokens=28, ignore_eos=True)
    sibling = make_request("1", [3] * 12, max_tokens=28, ignore_eos=True, leader=leader, seed=1)
    plan = Plan(groups=groups, num_blocks=17, num_host_blocks=40, max_num_seqs=2)
    plan.arrivals = [(0, [first, leader, sibling])]
    outcome = run(plan)
    assert outcome.num_swaps > 0
    assert all(one.output_token_ids == expected_answer(one)[0] for one in plan.requests)
