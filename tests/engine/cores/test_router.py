"""Choice of a core: the rule by hand, and its benefit in a simulation."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence

import pytest

from toolkit.engine.cores.router import ANSWER_TOKENS, BLOCK, Placement, Router
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
    candidates: Sequence[int],
    *,
    num_answers: int = 1,
    max_tokens: int = 64,
    salt: str = "",
    cached: bool = True,
) -> Placement:
    spec = SequenceSpec(
        prompt_token_ids=tokens,
        params=SamplingParams(n=num_answers),
        max_tokens=max_tokens,
        eos_token_ids=[],
        cache_salt=salt,
    )
    return router.place(spec, candidates, caches=cached)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(length)]


def test_unrelated_requests_are_spread_evenly():
    made = router(4)
    cores = [place(made, prompt(i, 100), range(4)).core for i in range(40)]
    assert [cores.count(core) for core in range(4)] == [10] * 4


def test_computed_prompts_and_ended_requests_add_no_load():
    made = router()
    first = place(made, prompt(1, 1000), [0, 1])
    busy = first.core
    assert [place(made, prompt(i, 10), [0, 1]).core for i in (2, 3)] == [1 - busy] * 2
    made.mark_computed(first)  # its remaining cost is one answer; the other core has two
    assert place(made, prompt(4, 10), [0, 1]).core == busy
    made.release(first)
    assert place(made, prompt(5, 10), [0, 1]).core == busy


def test_a_cached_prefix_wins_until_the_core_is_too_busy():
    """10 open answers are a load of 640 tokens. One core has cached 512 or 768 tokens of the
    prompt.
    """
    for known, expected in ((512, False), (768, True)):
        made = router()
        first = place(made, prompt(1, known), [0, 1])
        made.release(first)
        for i in range(640 // ANSWER_TOKENS):
            made.mark_computed(place(made, prompt(100 + i, 20), [first.core]))
        assert (place(made, [*prompt(1, known), 1, 2, 3], [0, 1]).core == first.core) is expected


def test_a_prefix_is_known_to_an_eighth_of_its_length():
    for length in (BLOCK, 5 * BLOCK, 1000, 30_000):
        made = router(capacity=100_000)
        made.release(place(made, prompt(1, length), [0, 1]))
        placement = place(made, prompt(1, length) + prompt(2, 8), [0, 1])
        assert placement.prompt <= 8 + BLOCK + length / 8


def test_salts_and_disabled_caching_prevent_hits():
    made = router()
    for options in ({"salt": "a"}, {"salt": "b"}, {"cached": False}, {}):
        assert place(made, prompt(1, 500), [0, 1], **options).prompt == 500


def test_evicted_prefixes_attract_no_requests():
    made = router(capacity=1000)
    made.release(place(made, prompt(1, 600), [0]))
    made.release(place(made, prompt(2, 600), [0]))
    assert place(made, prompt(2, 600), [0]).prompt < 600
    assert place(made, prompt(1, 600), [0]).prompt > 100, (
        "the cache has evicted at least its longest prefix"
    )
    made.connect(0, 1000)
    assert place(made, prompt(2, 600), [0]).prompt == 600
    made.clear_prefixes(0)
    assert place(made, prompt(2, 600), [0]).prompt == 600


def test_prefixes_of_models_with_states_count_where_a_snapshot_is():
    """At a prompt's end, and where a second one parted from it."""
    made = Router(1)
    made.connect(0, CAPACITY, has_states=True)
    system = prompt(1, 1024)

    def missing(tokens: list[int]) -> int:
        placement = place(made, tokens, [0])
        tokens_left = placement.prompt
        made.release(placement)
        return tokens_left

    first, second, third = (system + prompt(i, 1024) for i in (2, 3, 4))
    assert missing(first) == 2048
    assert missing(first + prompt(5, 8)) < 8 + 300  # a conversation goes on
    assert missing(second) == 2048  # its beginning is cached, without a state
    assert 1024 <= missing(third) < 1024 + 200
    made.clear_prefixes(0)
    assert missing(third) == 2048


def test_front_ends_agree_on_new_prompts_of_idle_cores():
    one, other = router(3), router(3)
    found = []
    for i in range(30):
        placements = [place(made, prompt(i, 50), range(3)) for made in (one, other)]
        found.append({placement.core for placement in placements})
        for made, placement in zip((one, other), placements, strict=True):
            made.release(placement)
    assert all(len(cores) == 1 for cores in found)
    assert set.union(*found) == {0, 1, 2}


def test_load_from_other_front_ends_counts():
    made = router()
    own = place(made, prompt(1, 10), [0])
    made.observe_loads([1, 3])  # one on core 0 is its own
    assert [place(made, prompt(i, 10), [0, 1]).core for i in (2, 3)] == [0, 0]
    made.release(own)


def test_n_answers_are_one_placement():
    made = router()
    placement = place(made, prompt(1, 10), [0, 1], num_answers=3, max_tokens=5)
    assert (placement.answers, placement.num_sequences) == (15, 3)


class Core:
    """Core with an LRU cache that computes SPEED tokens per step."""

    SPEED = 250

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity // BLOCK
        self._cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self.hits = self.work = 0
        self.open: list[list[int]] = []
        """[prompt tokens to compute, tokens to generate, number] of each request."""

    def add(self, tokens: list[int], answer: int, number: int) -> None:
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
        """Return (numbers of requests whose prompts were just computed, of those that ended)."""
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
    """Return (cache hit rate, maximum over mean work of a core, mean steps to the first token).

    Each of 4 cores can cache 14 of the 40 prefixes.
    """
    rng = random.Random(7)
    prefixes = [[rng.randrange(1000) for _ in range(512)] for _ in range(40)]
    cores = [Core(14 * 640) for _ in range(4)]
    made, placements = router(4, 14 * 640), dict[int, Placement]()
    arrived, waits, num_tokens, step = dict[int, int](), [], 0, 0
    next_arrival = 0.0
    while len(arrived) < num_requests or any(core.open for core in cores):
        step += 1
        while len(arrived) < num_requests and next_arrival <= step:
            next_arrival += rng.expovariate(1.5)
            tokens = rng.choice(prefixes) + [
                rng.randrange(1000) for _ in range(rng.randrange(16, 64))
            ]
            number = len(arrived)
            if policy == "router":
                placements[number] = place(made, tokens, range(4))
                core = placements[number].core
            else:
                core = rng.randrange(4) if policy == "random" else number % 4
            cores[core].add(tokens, rng.randrange(32, 224), number)
            arrived[number] = step
            num_tokens += len(tokens)
        for core in cores:
            computed, ended = core.step()
            waits += [step - arrived[number] for number in computed]
            if policy == "router":
                for number in computed:
                    made.mark_computed(placements[number])
                for number in ended:
                    made.release(placements[number])
    work = [core.work for core in cores]
    return (
        sum(core.hits for core in cores) / num_tokens,
        4 * max(work) / sum(work),
        sum(waits) / len(waits),
    )


def test_routing_beats_random_and_round_robin():
    hits, balance, wait = simulate("router")
    assert balance < 1.15
    for other in ("random", "round robin"):
        other_hits, _, other_wait = simulate(other)
        assert hits > 1.8 * other_hits
        assert wait < 0.5 * other_wait


@pytest.mark.parametrize("count", [1, 3])
def test_only_running_cores_are_chosen(count):
    made = router(4)
    running = list(range(count))
    assert {place(made, prompt(i, 50), running).core for i in range(20)} == set(running)
