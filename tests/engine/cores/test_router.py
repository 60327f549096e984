"""Which core a request goes to: the rule, by hand, and what it is worth in a simulation."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from toolkit.engine.cores.router import ANSWER, BLOCK, Router, Share
from toolkit.sampling.params import SamplingParams
from toolkit.sequence import SequenceSpec

CAPACITY = 10_000


def router(num_cores: int = 2, capacity: int = CAPACITY) -> Router:
    made = Router(num_cores)
    for core in range(num_cores):
        made.connect(core, capacity)
    return made


def place(
    router: Router,
    tokens: list[int],
    among: Sequence[int],
    *,
    num_answers: int = 1,
    max_tokens: int = 64,
    salt: str = "",
    cached: bool = True,
) -> Share:
    spec = SequenceSpec(
        prompt_token_ids=tokens,
        params=SamplingParams(n=num_answers),
        max_tokens=max_tokens,
        eos_token_ids=[],
        cache_salt=salt,
    )
    return router.place(spec, among, caches=cached)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_requests_that_have_nothing_in_common_are_spread_evenly():
    made = router(4)
    cores = [place(made, prompt(i, 100), range(4)).core for i in range(40)]
    assert [cores.count(core) for core in range(4)] == [10] * 4


def test_what_is_computed_and_what_has_ended_counts_no_more():
    made = router()
    first = place(made, prompt(1, 1000), [0, 1])
    busy = first.core
    assert [place(made, prompt(i, 10), [0, 1]).core for i in (2, 3)] == [1 - busy] * 2
    made.computed(first)  # what is left of it is one answer, and the other core has two
    assert place(made, prompt(4, 10), [0, 1]).core == busy
    made.end(first)
    assert place(made, prompt(5, 10), [0, 1]).core == busy


def test_a_core_keeps_a_beginning_until_its_load_outweighs_computing_it_again():
    """10 open answers are 640 tokens of load; 512 tokens of a prompt are known to the one, 768 to the other."""
    for known, expected in ((512, False), (768, True)):
        made = router()
        begun = place(made, prompt(1, known), [0, 1])
        made.end(begun)
        for i in range(640 // ANSWER):
            made.computed(place(made, prompt(100 + i, 20), [begun.core]))
        assert (place(made, [*prompt(1, known), 1, 2, 3], [0, 1]).core == begun.core) is expected


def test_a_beginning_is_known_to_an_eighth_of_its_length_whatever_the_length():
    for length in (BLOCK, 5 * BLOCK, 1000, 30_000):
        made = router(capacity=100_000)
        made.end(place(made, prompt(1, length), [0, 1]))
        share = place(made, prompt(1, length) + prompt(2, 8), [0, 1])
        assert share.prompt <= 8 + BLOCK + length / 8


def test_prompts_with_other_salts_or_that_cores_do_not_keep_have_nothing_in_common():
    made = router()
    for options in ({"salt": "a"}, {"salt": "b"}, {"cached": False}, {}):
        assert place(made, prompt(1, 500), [0, 1], **options).prompt == 500


def test_what_a_core_has_forgotten_or_lost_attracts_nothing():
    made = router(capacity=1000)
    made.end(place(made, prompt(1, 600), [0]))
    made.end(place(made, prompt(2, 600), [0]))
    assert place(made, prompt(2, 600), [0]).prompt < 600
    assert place(made, prompt(1, 600), [0]).prompt > 100, (
        "the cache has dropped at least the longest of it"
    )
    made.connect(0, 1000)
    assert place(made, prompt(2, 600), [0]).prompt == 600
    made.forget_prompts(0)
    assert place(made, prompt(2, 600), [0]).prompt == 600


def test_front_ends_agree_on_new_prompts_while_all_is_quiet():
    one, other = router(3), router(3)
    found = []
    for i in range(30):
        shares = [place(made, prompt(i, 50), range(3)) for made in (one, other)]
        found.append({share.core for share in shares})
        for made, share in zip((one, other), shares, strict=True):
            made.end(share)
    assert all(len(cores) == 1 for cores in found)
    assert set.union(*found) == {0, 1, 2}


def test_what_other_front_ends_have_sent_counts():
    made = router()
    own = place(made, prompt(1, 10), [0])
    made.observe([1, 3])  # of those of core 0 it has sent one itself
    assert [place(made, prompt(i, 10), [0, 1]).core for i in (2, 3)] == [0, 0]
    made.end(own)


def test_siblings_are_one_share_of_as_many_answers():
    made = router()
    share = place(made, prompt(1, 10), [0, 1], num_answers=3, max_tokens=5)
    assert (share.answers, share.num_sequences) == (15, 3)


class Core:
    """A cache that drops what was used least recently, and a device that computes so many tokens in a step."""

    SPEED = 250

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity // BLOCK
        self._cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.hits = self.work = 0
        self.open: list[list[int]] = []
        """[tokens of the prompt to compute, tokens to generate, number] of each request."""

    def take(self, tokens: list[int], answer: int, number: int) -> None:
        blocks = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        num_known = next(
            (i for i, block in enumerate(blocks) if block not in self._cache), len(blocks)
        )
        for block in reversed(blocks):
            self._cache[block] = None
            self._cache.move_to_end(block)
        while len(self._cache) > self._capacity:
            self._cache.popitem(last=False)
        self.hits += num_known * BLOCK
        self.work += len(tokens) - num_known * BLOCK + answer
        self.open.append([len(tokens) - num_known * BLOCK, answer, number])

    def step(self) -> tuple[list[int], list[int]]:
        """(numbers of those whose prompts are computed now, of those that have ended)."""
        left, computed, ended = self.SPEED, [], []
        for request in self.open:
            count = min(left, request[0] or 1)
            left -= count
            if request[0]:
                request[0] -= count
                computed += [request[2]] * (not request[0])
            else:
                request[1] -= count
                ended += [request[2]] * (not request[1])
        self.open = [request for request in self.open if request[1]]
        return computed, ended


def simulate(policy: str, num_requests: int = 600) -> tuple[float, float, float]:
    """(share of prompt tokens found in a cache, most work of a core over the mean, mean steps to the first token) of 4
    cores. Each has room for 14 of the 40 beginnings that prompts have.
    """
    rng = random.Random(7)
    beginnings = [[rng.randrange(1000) for _ in range(512)] for _ in range(40)]
    cores = [Core(14 * 640) for _ in range(4)]
    made, shares = router(4, 14 * 640), dict[int, Share]()
    arrived, waits, num_tokens, step = dict[int, int](), [], 0, 0
    next_arrival = 0.0
    while len(arrived) < num_requests or any(core.open for core in cores):
        step += 1
        while len(arrived) < num_requests and next_arrival <= step:
            next_arrival += rng.expovariate(1.5)
            tokens = rng.choice(beginnings) + [
                rng.randrange(1000) for _ in range(rng.randrange(16, 64))
            ]
            number = len(arrived)
            if policy == "router":
                shares[number] = place(made, tokens, range(4))
                core = shares[number].core
            else:
                core = rng.randrange(4) if policy == "random" else number % 4
            cores[core].take(tokens, rng.randrange(32, 224), number)
            arrived[number] = step
            num_tokens += len(tokens)
        for core in cores:
            computed, ended = core.step()
            waits += [step - arrived[number] for number in computed]
            if policy == "router":
                for number in computed:
                    made.computed(shares[number])
                for number in ended:
                    made.end(shares[number])
    work = [core.work for core in cores]
    return (
        sum(core.hits for core in cores) / num_tokens,
        4 * max(work) / sum(work),
        sum(waits) / len(waits),
    )


def test_more_is_found_in_caches_than_at_random_or_in_turn_and_nobody_has_much_more_to_do():
    hits, balance, wait = simulate("router")
    assert balance < 1.15
    for other in ("random", "round robin"):
        others_hits, _, others_wait = simulate(other)
        assert hits > 1.8 * others_hits
        assert wait < 0.5 * others_wait


@pytest.mark.parametrize("count", [1, 3])
def test_only_cores_that_run_are_chosen(count):
    made = router(4)
    running = list(range(count))
    assert {place(made, prompt(i, 50), running).core for i in range(20)} == set(running)
