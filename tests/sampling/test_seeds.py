"""A seed gives the same text with any other requests, and after preemptions."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import engines
from tests.checkpoints import VOCAB
from toolkit import LLM, SamplingParams
from toolkit.sampling.params import answer_seed

KINDS = {
    "plain": {"temperature": 1.5},
    "top-k": {"temperature": 2.0, "top_k": 7},
    "top-p": {"temperature": 2.0, "top_p": 0.8},
    "penalties": {
        "temperature": 1.5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.5,
        "min_p": 0.02,
    },
    "window": {"temperature": 1.5, "repetition_penalty": 1.5, "penalty_window": 6},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def seeded(kind: str, seed: int, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=24, ignore_eos=True, seed=seed, **KINDS[kind] | more)


def random_requests(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    requests = []
    for _ in range(rng.randrange(1, 7)):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))]
        settings = dict(rng.choice([*KINDS.values(), {"temperature": 0.0}]))
        requests.append(
            (prompt, SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True, **settings))
        )
    return requests


@pytest.fixture(scope="module")
def llm(checkpoint: Callable[[str], Path]) -> LLM:
    return LLM(str(checkpoint("qwen3")), device="cpu", max_num_seqs=8)


@pytest.fixture(scope="module")
def tight(checkpoint: Callable[[str], Path]) -> Callable[[float], LLM]:
    """Start an engine that preempts all the time: by recompute, or with swap space."""
    return lambda swap: LLM(
        str(checkpoint("qwen3")),
        device="cpu",
        max_num_seqs=8,
        num_gpu_blocks_override=42,
        block_size=4,
        swap_space=swap,
        async_scheduling=bool(swap),
        max_num_batched_tokens=20,
    )


def tokens(llm: LLM, *requests: tuple[list[int], SamplingParams]) -> list[list[int]]:
    outputs = llm.generate([prompt for prompt, _ in requests], [params for _, params in requests])
    return [list(answer.token_ids) for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_other_requests_do_not_change_the_text(llm, kind):
    request = (PROMPT, seeded(kind, 11))
    (alone,) = tokens(llm, request)
    rng = random.Random(kind)
    for _ in range(5):
        others = random_requests(rng)
        place = rng.randrange(len(others) + 1)
        assert tokens(llm, *others[:place], request, *others[place:])[place] == alone


@pytest.mark.parametrize("swap", [0.0, 0.001])
def test_preemption_does_not_change_the_text(llm, tight, swap):
    requests = [(PROMPT * 3, seeded(kind, 5, min_tokens=24)) for kind in KINDS]
    expected = [tokens(llm, one)[0] for one in requests]
    small = tight(swap)
    num_preempted = engines.count_stats(small, "num_preemptions")
    filler = [([i] * 30, SamplingParams(max_tokens=60, ignore_eos=True)) for i in range(4)]
    assert tokens(small, *filler, *requests)[4:] == expected
    assert num_preempted() > 0


def test_different_seeds_give_different_texts(llm):
    answers = tokens(llm, *[(PROMPT, seeded("plain", seed)) for seed in range(20)])
    assert len({tuple(answer) for answer in answers}) == 20


def test_answers_without_a_seed_differ(llm):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.5)
    first, second = tokens(llm, (PROMPT, params), (PROMPT, params))
    assert first != second


def test_the_seed_of_the_engine_makes_it_reproducible(checkpoint):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.5)

    def run(seed: int) -> list[list[int]]:
        llm = LLM(str(checkpoint("qwen3")), device="cpu", max_num_seqs=4, seed=seed)
        return tokens(llm, (PROMPT, params), ([7, 7], params))

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_answers_of_one_seed_differ_and_are_reproducible(llm):
    params = seeded("plain", 99, n=4)
    answers = tokens(llm, (PROMPT, params))
    assert len({tuple(answer) for answer in answers}) == 4
    others = random_requests(random.Random(1))
    assert tokens(llm, *others, (PROMPT, params))[len(others) :] == answers
    assert tokens(llm, (PROMPT, seeded("plain", 99)))[0] == answers[0]


def test_answers_of_neighbouring_seeds_differ():
    seeds = [answer_seed(seed, index) for seed in range(-5, 5) for index in range(8)]
    assert len(set(seeds)) == 80
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert seeds[::8] == list(range(-5, 5)), "the first answer has the request's seed"
    assert answer_seed(2**63 + 1, 0) == 1 - 2**63
