"""Prefix cache: blocks that are found again, order of reuse, and sharing between requests."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scheduler.simulation import Plan, expected_answer, make_request, run
from toolkit.scheduler import BlockPool, HostBlockPool
from toolkit.scheduler.blocks.block_pool import hash_block

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


class NaivePool:
    """The pool's contract with plain lists. `free` is in the order in which blocks are reused."""

    def __init__(self, num_blocks: int) -> None:
        self.held = [0] * num_blocks
        self.content: dict[int, bytes] = {}
        self.free = list(range(num_blocks))

    def allocate(self, count: int) -> list[int] | None:
        if count > len(self.free):
            return None
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            self.held[block] = 1
            self.content.pop(block, None)
        return taken

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            self.held[block] += 1
            if block in self.free:
                self.free.remove(block)

    def release(self, blocks: list[int]) -> None:
        for block in blocks[::-1]:
            self.held[block] -= 1
            if not self.held[block]:
                self.free.insert(len(self.free) if block in self.content else 0, block)

    def register(self, block: int, name: bytes) -> None:
        if block not in self.content and name not in self.content.values():
            self.content[block] = name

    def find(self, names: list[bytes]) -> list[int]:
        found = []
        for name in names:
            block = next((b for b, content in self.content.items() if content == name), None)
            if block is None:
                return found
            found.append(block)
        return found


@given(data=st.data(), num_blocks=st.integers(1, 9))
@quick
def test_the_pool_behaves_like_plain_lists(data, num_blocks):
    pool, naive = BlockPool(num_blocks), NaivePool(num_blocks)
    names = [bytes([i]) * 16 for i in range(6)]
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["allocate", "share", "release", "register", "evict"]))
        if action == "allocate":
            count = data.draw(st.integers(0, 4))
            blocks = pool.allocate(count)
            assert blocks == naive.allocate(count)
            if blocks:
                tables.append(blocks)
        elif action == "share":
            wanted = data.draw(st.lists(st.sampled_from(names), max_size=4, unique=True))
            found = pool.find(wanted)
            assert found == naive.find(wanted)
            assert pool.num_free_among(found) == sum(block in naive.free for block in found)
            pool.share(found)
            naive.share(found)
            if found:
                tables.append(found)
        elif action == "release" and tables:
            table = tables.pop(data.draw(st.integers(0, len(tables) - 1)))
            pool.release(table)
            naive.release(table)
        elif action == "register" and tables:
            block = data.draw(st.sampled_from(data.draw(st.sampled_from(tables))))
            name = data.draw(st.sampled_from(names))
            pool.register(block, name)
            naive.register(block, name)
        elif action == "evict" and data.draw(st.booleans()):
            pool.evict_all()
            naive.content.clear()
        assert pool.num_free == len(naive.free)
        assert list(pool._free) == naive.free
        assert pool.usage == 1 - len(naive.free) / num_blocks


def test_blocks_are_reused_by_age_and_prompts_from_the_end():
    pool = BlockPool(6)
    first, second = pool.allocate(3), pool.allocate(2)
    for block in first + second:
        pool.register(block, bytes([block]) * 16)
    pool.release(first)
    pool.release(second)
    unused = 5
    assert pool.allocate(6) == [unused, *first[::-1], *second[::-1]]


def test_releasing_a_block_too_often_raises():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release(blocks)


def test_each_host_block_is_allocated_once():
    pool = HostBlockPool(4)
    first = pool.allocate(3)
    assert pool.allocate(2) is None
    rest = pool.allocate(1)
    assert sorted(first + rest) == [0, 1, 2, 3]
    pool.release(first)
    assert pool.num_free == 3


def test_block_hashes_depend_on_parent_tokens_and_salt():
    names = {
        hash_block(parent, array("i", tokens).tobytes(), salt)
        for parent in (b"", b"p" * 16, b"q" * 16)
        for tokens in ([1, 2], [2, 1], [1, 3], [12, 0])
        for salt in ("", "a", "b", "ab")
    }
    assert len(names) == 3 * 4 * 4
    assert hash_block(b"", b"12341234", "a") == hash_block(b"", b"12341234", "a")


def longest_cached_prefix(tokens: list[int], seen: list[list[int]], block_size: int) -> int:
    """Return the cached prefix length in full blocks. At least one token must be computed."""
    best = 0
    for other in seen:
        common = next(
            (i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None
        )
        best = max(best, min(len(tokens), len(other)) if common is None else common)
    return min(best, len(tokens) - 1) // block_size * block_size


prompts = st.lists(st.integers(2, 3), min_size=1, max_size=24)


@given(
    turns=st.lists(st.tuples(prompts, st.sampled_from(["", "a", "b"])), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 3, 4]),
)
@quick
def test_hits_are_the_longest_common_prefix_with_equal_salt(turns, block_size):
    """Sequential requests in a pool without evictions: answers are found like prompts.

    Eight of 32 tokens fit in it."""
    requests = [
        make_request(f"{i}", prompt, salt=salt, max_tokens=8, seed=i)
        for i, (prompt, salt) in enumerate(turns)
    ]
    plan = Plan(
        block_size=block_size,
        num_blocks=260,
        arrivals=[(i * 100, [r]) for i, r in enumerate(requests)],
    )
    run(plan)
    seen: dict[str, list[list[int]]] = {}
    for request in requests:
        computed = seen.setdefault(request.cache_salt, [])
        assert request.num_cached_tokens == longest_cached_prefix(
            request.prompt_token_ids, computed, block_size
        )
        computed.append((request.prompt_token_ids + expected_answer(request)[0])[:-1])


def test_a_prompt_is_shared_in_the_step_that_computes_it():
    requests = [make_request(f"{i}", [2] * 12 + [i], max_tokens=3, seed=i) for i in range(3, 7)]
    plan = Plan(budget=100, num_blocks=60, arrivals=[(0, requests)])
    outcome = run(plan)
    assert [request.num_cached_tokens for request in requests] == [0, 12, 12, 12]
    assert outcome.trace[0][1] == [13, 1, 1, 1]


def test_uncacheable_requests_share_nothing():
    requests = [make_request(f"{i}", [2] * 12, max_tokens=3, cacheable=False) for i in range(3)]
    run(Plan(num_blocks=60, arrivals=[(0, requests)]))
    assert [request.num_cached_tokens for request in requests] == [0, 0, 0]


def test_a_reset_evicts_the_cache_and_keeps_running_requests():
    from tests.scheduler.simulation import Device, make_scheduler

    plan = Plan(num_blocks=60, budget=100)
    scheduler, device = make_scheduler(plan), Device(plan)
    running = make_request("running", [2] * 12, max_tokens=20, ignore_eos=True)
    scheduler.add(running)
    for turn in range(30):
        if turn == 3:
            scheduler.reset_prefix_cache()
            late = make_request("late", [2] * 12, max_tokens=4)
            scheduler.add(late)
        step = scheduler.schedule()
        if step is not None:
            scheduler.update(step, device.execute(step))
    assert late.num_cached_tokens == 0
    assert running.output_token_ids == expected_answer(running)[0]
    assert late.output_token_ids == expected_answer(late)[0]
    assert scheduler.pool.num_free == 60


def test_an_evicted_block_is_not_found_again():
    """The pool cannot hold both prompts, so the first is computed again."""
    first, second = [2] * 16, [3] * 16
    requests = [
        make_request(f"{i}", prompt, max_tokens=1)
        for i, prompt in enumerate((first, second, first, first))
    ]
    run(Plan(num_blocks=6, arrivals=[(i * 50, [r]) for i, r in enumerate(requests)]))
    assert requests[2].num_cached_tokens < 12
    assert requests[3].num_cached_tokens == 12


def test_a_preempted_request_finds_its_generated_blocks():
    """Its blocks are found unless they were reused. The first ones are reused last."""
    from tests.scheduler.simulation import Device, make_scheduler

    plan = Plan(num_blocks=14, budget=100)
    scheduler, device = make_scheduler(plan), Device(plan)
    first, second = (
        make_request(f"{i}", [i] * 5, max_tokens=30, ignore_eos=True, seed=i) for i in (2, 3)
    )
    for request in (first, second):
        scheduler.add(request)
    resumed_at = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        resumed_at += [new.num_computed_tokens for new in step.new_rows if len(new.token_ids) > 5]
        scheduler.update(step, device.execute(step))
    assert second.num_preemptions > 0
    assert max(resumed_at) > 5
    assert second.output_token_ids == expected_answer(second)[0]


@pytest.mark.parametrize("budget", [8, 100])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_common_prefix_of_resumed_requests_is_computed_once(budget: int, depth: int):
    """After a restart, 50 requests share a long prompt; each has its own output tokens."""
    requests = [
        make_request(f"{i}", [*[2, 3] * 12], max_tokens=8, ignore_eos=True, seed=i)
        for i in range(50)
    ]
    answers = [expected_answer(request)[0] for request in requests]
    for request, answer in zip(requests, answers, strict=True):
        request.resume(answer[:5])
    plan = Plan(
        num_blocks=600, max_num_seqs=50, budget=budget, depth=depth, arrivals=[(0, requests)]
    )
    outcome = run(plan)
    assert [request.output_token_ids for request in requests] == answers
    computed = sum(sum(num_tokens) for _, num_tokens, *_ in outcome.trace)
    assert computed == 24 + 50 * (5 + 3 - 1), (
        "the prompt once, and each request's own tokens except the last"
    )


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda pool: None, None),
        (
            lambda pool: pool._references.__setitem__(0, 2),
            "block 0 has 2 references and 1 requests",
        ),
        (lambda pool: pool._free.pop(3), "block 3 has 0 references and is not free"),
        (lambda pool: pool._free.update({0: None}), "block 0 has 1 references and is free"),
        (lambda pool: pool._hash_of.__setitem__(2, b"h"), "block 2 has a hash by which it is not"),
        (lambda pool: pool._block_of.update({b"h": 2}), "block 2 is found by a hash that it does"),
    ],
)
def test_wrong_accounts_of_blocks_are_found(spoil, words):
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool.register(held[1], b"known")
    spoil(pool)
    found = pool.problem([held])
    assert (found is None) == (words is None)
    assert words is None or words in found
    assert pool.problem([[*held, 4]]) is not None
    assert pool.problem([[held[0]]]) is not None
