"""Drafts of constrained requests on the GPU's runner, in Triton's interpreter.

The answers are those of the CPU's runner without drafts."""

from __future__ import annotations

import random
import re
from collections import Counter
from pathlib import Path

import pytest

from tests import engines
from tests.speculative.drafting import StepLog, few_measured_steps, logged_steps, save_llama
from tests.speculative.plain import shrink_unlikely
from toolkit import LLM, SamplingParams
from toolkit.kernels.table import CPUKernels, TritonKernels
from toolkit.sampling.params import StructuredOutputsParams

A, B, C, D = range(32, 36)
"""Tokens of these letters: bytes have numbers in the order of their characters."""


def grammar(**one: object) -> dict:
    return {"structured_outputs": StructuredOutputsParams(**one)}


KINDS = {
    "none": {},
    "regex": grammar(regex="(AB|BA){9,}"),
    "letters": grammar(regex="[A-C]{9,30}") | {"logprobs": 1},
    "choice": grammar(choice=["ABCABCABCABC", "ABCABCABCABA", "CCCCCCCC"]),
    "grammar and penalties": grammar(regex="[A-D]{20}") | {"presence_penalty": 0.2},
    "grammar and bias": grammar(regex="[A-D]{9,}") | {"logit_bias": {B: 2.0}},
    "min_tokens": {"min_tokens": 7, "stop_token_ids": [A, B]},
    "bias": {"logit_bias": {A: 1.5, C: -0.5}, "logprobs": 0},
    "bad words": {"bad_words_token_ids": [[A, A], [B, C, B], [C, A, B, C], [D]]},
    "allowed tokens": {"allowed_token_ids": [A, B, D]},
    "bias and penalties": {"logit_bias": {A: 1.0}, "frequency_penalty": 0.1},
}
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "attention_backend": "torch",
    "max_num_seqs": 3,
    "max_num_batched_tokens": 30,
    "max_model_len": 64,
    "block_size": 4,
    "async_scheduling": True,
}
NUM_REQUESTS = len(KINDS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose likely tokens are letters, so that some drafts are right."""
    folder = tmp_path_factory.mktemp("target")
    return shrink_unlikely(save_llama(folder, seed=3, num_hidden_layers=2), [A, B, C])


def requests() -> tuple[list[dict], list[SamplingParams]]:
    """Return a request of each kind, every other one random. Its seed is a request's number."""
    rng = random.Random(3)
    prompts = [rng.choices([A, B, C], k=rng.randint(2, 12)) * 2 for _ in range(NUM_REQUESTS)]
    params = []
    for number in range(NUM_REQUESTS):
        kind = list(KINDS.values())[number % len(KINDS)]
        given = {"temperature": 0.7 * (number % 2), "max_tokens": 8, "seed": number}
        params.append(SamplingParams(**given | kind))
    return [{"prompt_token_ids": prompt} for prompt in prompts], params


def answers(llm: LLM) -> list[tuple]:
    """Return all that is said about the requests."""
    found = []
    for output in llm.generate(*requests(), use_tqdm=False):
        (answer,) = output.outputs
        logprobs = [x.logprob for at in answer.logprobs or () for x in at.values()]
        facts = answer.text, answer.finish_reason, answer.stop_reason
        found.append((list(answer.token_ids), *facts, logprobs))
    return found


@pytest.fixture(scope="module")
def expected(target: Path) -> list[tuple]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.worker.worker.kernels_for", lambda device: CPUKernels())
        llm = LLM(str(target), **SETTINGS)
        found = answers(llm)
        llm.shutdown()
    return found


def speculation(method: str, target: Path) -> dict[str, object]:
    """Return the configuration of a drafter: prompt lookup, or the model itself."""
    of_method = {"prompt_lookup_min": 1} if method == "ngram" else {"model": str(target)}
    return {"method": method, "num_speculative_tokens": 2, **of_method}


def count_by_kind(log: StepLog) -> tuple[Counter[str], Counter[str]]:
    """Return the drafts that were verified and accepted, by kind."""
    verified, accepted = Counter[str](), Counter[str]()
    kinds: dict[int, str] = {}
    for step, output in log.steps:
        for new in step.new_rows:
            kinds[new.row] = list(KINDS)[new.spec.params.seed % len(KINDS)]
        for at, row in enumerate(step.rows[step.samples].tolist()):
            verified[kinds[row]] += int(step.num_sampled[at]) - 1
            accepted[kinds[row]] += int(output.counts[at]) - 1
    return verified, accepted


FEW_BLOCKS = {"num_gpu_blocks_override": 16}
CASES = {
    "lookup, stages, swap": (
        "ngram",
        "rerun_graphs two_stages",
        FEW_BLOCKS | {"pipeline_parallel_size": 2, "swap_space": 0.001},
    ),
    "model, recomputation": ("draft_model", "gpu_runner", FEW_BLOCKS),
}
"""Method, fixtures, and settings. `test_differential` has more combinations for a GPU."""


@pytest.mark.parametrize("case", CASES)
def test_constrained_answers_are_those_without_drafts(request, target, expected, case: str):
    """Requests of all kinds in one batch, next to chunks of prompts."""
    method, fixtures, settings = CASES[case]
    for fixture in fixtures.split():
        request.getfixturevalue(fixture)
    config = speculation(method, target)
    with few_measured_steps():
        llm = LLM(str(target), **SETTINGS | settings, speculative_config=config)
    assert type(engines.kernels(llm)) is TritonKernels
    with logged_steps(llm) as log:
        for one, other in zip(answers(llm), expected, strict=True):
            assert one[:-1] == other[:-1]
            assert one[-1] == pytest.approx(other[-1], abs=1e-4)
    llm.shutdown()
    verified, accepted = count_by_kind(log)
    assert set(verified) == set(KINDS)
    assert min(verified.values()) > 0
    of_grammars = sum(accepted[name] for name in KINDS if "structured_outputs" in KINDS[name])
    assert 3 < of_grammars < sum(accepted.values()) - 3
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert (num_placed > NUM_REQUESTS) == ("num_gpu_blocks_override" in settings)
    assert any(step.swap_in for step, _ in log.steps) == ("swap_space" in settings)


def test_grammars_hold_where_drafts_are_missing(gpu_runner, target):
    """Steps that overlap have room for drafts that are not found. What is there can be right."""
    config = {"method": "ngram", "prompt_lookup_min": 3, "num_speculative_tokens": 3}
    with few_measured_steps():
        llm = LLM(str(target), **SETTINGS, speculative_config=config)
    prompts = [{"prompt_token_ids": [A, B, C, A, A, B, C, A, B]}] * 3
    params = [
        SamplingParams(temperature=1.0, max_tokens=16, seed=seed, **grammar(regex="[A-C]{50}"))
        for seed in range(len(prompts))
    ]
    with logged_steps(llm) as log:
        found = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    for answer in found:
        assert re.fullmatch("[A-C]{16}", answer.outputs[0].text)
    assert log.num_accepted > 5
    assert num_missing_drafts(log) > 5


def num_missing_drafts(log: StepLog) -> int:
    """Return how many drafts were verified that the step before had not found."""
    found: dict[int, int] = {}
    missing = 0
    for step, output in log.steps:
        rows = step.rows[step.samples].tolist()
        for row, count, drafts in zip(rows, step.num_sampled, output.drafts, strict=True):
            missing += max(0, int(count) - 1 - found.get(row, 0))
            found[row] = int((drafts >= 0).sum())
    return missing
