"""Random requests with each drafter and without: the same answers, in fp32 on a CPU."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.speculative.drafting import logged_steps, save_llama
from toolkit import LLM, SamplingParams
from toolkit.sampling.params import StructuredOutputsParams

NUM_REQUESTS = 200
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
    "max_model_len": 120,
    "block_size": 4,
    "num_gpu_blocks_override": 80,
}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["aa", "ab", "aba"]}}, "required": ["a"]}
GRAMMARS = [
    {"regex": "(ab|ba)*c{1,9}"},
    {"regex": "[a-d]{3,30}"},
    {"json": SCHEMA},
    {"choice": ["abcabcabcabc", "abcabcabcabd"]},
]


def random_params(rng: random.Random) -> dict[str, Any]:
    """Return parameters of a request: each option for some."""
    params: dict[str, Any] = {"max_tokens": rng.randint(1, 40), "seed": rng.randrange(10**6)}
    params["temperature"] = rng.choice([0.0, 0.0, 0.3, 1.0])
    options = [
        {"top_k": rng.randint(1, 40)},
        {"top_p": rng.random() * 0.9 + 0.1},
        {"min_p": rng.random() * 0.2},
        {"repetition_penalty": 1 + rng.random()},
        {"presence_penalty": rng.random(), "frequency_penalty": -rng.random()},
        {"min_tokens": min(5, params["max_tokens"])},
        {"ignore_eos": True},
        {"stop": ["ab", "c", "zz"][: rng.randint(1, 3)]},
        {"stop_token_ids": rng.sample(range(256), 12)},
        {"bad_words": ["a", "bc"]},
        {"logit_bias": {rng.randrange(256): rng.choice([-100.0, 3.0]) for _ in range(9)}},
        {"allowed_token_ids": rng.sample(range(256), 30)},
        {"logprobs": rng.randint(0, 4)},
        {"prompt_logprobs": 1},
        {"n": rng.randint(2, 3)},
        {"num_speculative_tokens": rng.randint(0, 3)},
        {"structured_outputs": StructuredOutputsParams(**rng.choice(GRAMMARS))},
    ]
    for option in rng.sample(options, rng.randint(0, 4)):
        params |= option
    if "structured_outputs" in params:
        for name in ("allowed_token_ids", "bad_words", "logit_bias", "stop", "stop_token_ids"):
            params.pop(name, None)
    return params


def random_requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return prompts, some of which begin alike, and their parameters."""
    rng = random.Random(0)
    begins = [[rng.randrange(256) for _ in range(rng.randint(4, 30))] for _ in range(12)]
    prompts = []
    for _ in range(NUM_REQUESTS):
        phrase = [rng.randrange(256) for _ in range(rng.randint(1, 6))]
        prompts.append((rng.choice(begins) + phrase * rng.randint(1, 6))[: rng.randint(1, 70)])
    return prompts, [SamplingParams(**random_params(rng)) for _ in prompts]


@dataclass
class Answers:
    """All that is said about requests. Sums depend on how many tokens a step computes together."""

    facts: list[list[Any]]  # by request
    logprobs: list[list[float]]


def run(llm: LLM) -> Answers:
    prompts, params = random_requests()
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = Answers([], [])
    for one in llm.generate(inputs, params, use_tqdm=False):
        positions = [at for at in one.prompt_logprobs or () if at]
        facts: list[Any] = [one.prompt_logprobs and len(one.prompt_logprobs)]
        for answer in one.outputs:
            facts += [list(answer.token_ids), answer.text, answer.finish_reason, answer.stop_reason]
            positions += answer.logprobs or ()
        facts += [[(token, x.rank) for token, x in at.items()] for at in positions]
        answers.facts.append(facts)
        logprobs = [x.logprob for at in positions for x in at.values()]
        logprobs += [one.cumulative_logprob or 0.0 for one in one.outputs]
        answers.logprobs.append(logprobs)
    return answers


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    small = {"hidden_size": 32, "num_hidden_layers": 1}
    return (
        save_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=2),
        save_llama(tmp_path_factory.mktemp("other"), seed=1, **small),
    )


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> Answers:
    llm = LLM(str(folders[0]), **SETTINGS, swap_space=0.001)
    found = run(llm)
    llm.shutdown()
    reasons = Counter(fact for facts in found.facts for fact in facts if isinstance(fact, str))
    assert min(reasons["stop"], reasons["length"]) > 20
    return found


@pytest.mark.parametrize("swap_space", [0, 0.001], ids=["recomputed", "swapped"])
@pytest.mark.parametrize("drafter", ["ngram", "itself", "other"])
def test_drafts_change_nothing(folders, expected, drafter, swap_space):
    config: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1}
    if drafter != "ngram":
        folder = folders[0] if drafter == "itself" else folders[1]
        config = {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}
    llm = LLM(str(folders[0]), **SETTINGS, swap_space=swap_space, speculative_config=config)
    with logged_steps(llm) as log:
        found = run(llm)
    llm.shutdown()
    for number, (one, other) in enumerate(zip(expected.facts, found.facts, strict=True)):
        assert one == other, number
    for one, other in zip(expected.logprobs, found.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    low, high = {"ngram": (0.02, 0.9), "itself": (0.7, 1.0), "other": (0.0, 0.5)}[drafter]
    assert low <= log.acceptance_rate <= high
    assert log.num_drafts > 500
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert num_placed > sum(facts.count("stop") + facts.count("length") for facts in found.facts)
    assert any(step.swap_in for step, _ in log.steps) == (swap_space > 0)
    assert any(step.samples.any() and not step.samples.all() for step, _ in log.steps)
