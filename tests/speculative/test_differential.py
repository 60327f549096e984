"""Random requests with each drafter and without: the same answers, in fp32."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import engines
from tests.speculative.drafting import StepLog, few_measured_steps, logged_steps, save_llama
from tests.speculative.near_ties import (
    NEAR,
    require_equal_or_near_tie,
    require_equal_or_near_ties,
    scores,
)
from tests.speculative.plain import Llama
from tests.speculative.test_eagle import eagle_tensors, write
from toolkit import LLM, SamplingParams
from toolkit.engine.outputs import CompletionOutput, Delta, Logprob, LogprobList, RequestOutput
from toolkit.sampling.params import StructuredOutputsParams, answer_seed

NUM_REQUESTS = 200 if torch.cuda.is_available() else 80
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


def answers_of(outputs: list[RequestOutput]) -> Answers:
    answers = Answers([], [])
    for one in outputs:
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


def speculation(drafter: str, folders: tuple[Path, Path], tmp_path: Path) -> dict[str, Any]:
    """Return the configuration of a drafter."""
    if drafter == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1}
    if drafter == "eagle":
        folder = write(tmp_path / "eagle", eagle_tensors(1, bias=True))
        return {"method": "eagle", "model": str(folder), "num_speculative_tokens": 3}
    folder = folders[0] if drafter == "itself" else folders[1]
    return {"method": "draft_model", "model": str(folder), "num_speculative_tokens": 3}


def run(llm: LLM) -> list[RequestOutput]:
    prompts, params = random_requests()
    return llm.generate([{"prompt_token_ids": one} for one in prompts], params, use_tqdm=False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    small = {"hidden_size": 32, "num_hidden_layers": 1}
    return (
        save_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=2),
        save_llama(tmp_path_factory.mktemp("other"), seed=1, **small),
    )


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path]) -> list[RequestOutput]:
    llm = LLM(str(folders[0]), **SETTINGS, swap_space=0.001)
    found = run(llm)
    llm.shutdown()
    reasons = Counter(answer.finish_reason for one in found for answer in one.outputs)
    assert min(reasons["stop"], reasons["length"]) > 10
    assert sum(one.num_cached_tokens > 0 for one in found) > 8
    return found


def require_equal(expected: list[RequestOutput], found: list[RequestOutput]) -> None:
    plain, drafted = answers_of(expected), answers_of(found)
    for number, (one, other) in enumerate(zip(plain.facts, drafted.facts, strict=True)):
        assert one == other, number
    for one, other in zip(plain.logprobs, drafted.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def require_allowed_drafts(log: StepLog) -> None:
    """Check that no step verified more drafts of a request than it wants.

    Drafts of requests with a grammar were verified, too."""
    wanted: dict[int, int | None] = {}
    num_limited = num_constrained = 0
    for step, _ in log.steps:
        if len(step.num_drafts):
            num_constrained += int(step.num_drafts[step.constrained].sum())
        wanted |= {new.row: new.spec.params.num_speculative_tokens for new in step.new_rows}
        for row, count in zip(step.rows.tolist(), step.num_drafts.tolist(), strict=False):
            if (most := wanted[row]) is not None:
                assert count <= most
                num_limited += count == most > 0
    assert num_limited > 4
    assert num_constrained > 15


@pytest.mark.parametrize(
    ("drafter", "swap_space"), [("ngram", 0.001), ("itself", 0), ("other", 0.001)]
)
def test_drafts_change_nothing(folders, expected, tmp_path, drafter, swap_space):
    config = speculation(drafter, folders, tmp_path)
    with few_measured_steps():
        llm = LLM(str(folders[0]), **SETTINGS, swap_space=swap_space, speculative_config=config)
    with logged_steps(llm) as log:
        found = run(llm)
    llm.shutdown()
    require_equal(expected, found)
    low, high = {"ngram": (0.02, 0.9), "itself": (0.5, 1.0), "other": (0.0, 0.5)}[drafter]
    assert low <= log.acceptance_rate <= high
    assert log.num_drafts > 200
    assert sum(one.num_cached_tokens > 0 for one in found) > 8
    require_allowed_drafts(log)
    num_placed = sum(len(step.new_rows) for step, _ in log.steps)
    assert num_placed > sum(len(one.outputs) for one in found)
    assert any(step.swap_in for step, _ in log.steps) == (swap_space > 0)
    assert any(step.samples.any() and not step.samples.all() for step, _ in log.steps)


@dataclass
class Streamed:
    """A request whose output is read as it grows."""

    number: int
    deltas: Iterator[Delta]
    leaves_at: int  # number of deltas after which its client leaves
    output: RequestOutput
    num_read: int = 0

    def read(self) -> bool:
        """Read a delta. Return False after the last one."""
        delta = next(self.deltas, None)
        self.num_read += 1
        if delta is None or self.num_read > self.leaves_at:
            self.deltas.close()
            return False
        answer = self.output.outputs[delta.index]
        assert answer.finish_reason is None, "a delta follows the last one"
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.finish_reason, answer.stop_reason = delta.finish_reason, delta.stop_reason
        for name, holder in (("logprobs", answer), ("prompt_logprobs", self.output)):
            if (new := getattr(delta, name)) is not None:
                if getattr(holder, name) is None:
                    setattr(holder, name, LogprobList(None))
                getattr(holder, name).extend(new)
        return True


@pytest.mark.parametrize(("drafter", "is_async"), [("ngram", True), ("itself", False)])
def test_streams_with_drafts_are_those_without(folders, expected, tmp_path, drafter, is_async):
    """Requests come one after another, and the clients of some leave early."""
    config = speculation(drafter, folders, tmp_path)
    with few_measured_steps():
        llm = LLM(str(folders[0]), **SETTINGS, async_scheduling=is_async, speculative_config=config)
    rng = random.Random(1)
    waiting, running, done = list(enumerate(zip(*random_requests(), strict=True))), [], []
    with logged_steps(llm) as log:
        while waiting or running:
            while waiting and len(running) < 16:
                number, (prompt, params) = waiting.pop(0)
                deltas = llm.stream({"prompt_token_ids": prompt}, params)
                answers = [CompletionOutput(index) for index in range(params.n)]
                output = RequestOutput(str(number), None, prompt, answers)
                leaves_at = rng.choice([1000, 1000, 1, 2])
                running.append(Streamed(number, deltas, leaves_at, output))
            one = rng.choice(running)
            if not one.read():
                running.remove(one)
                done.append(one)
    assert not engines.core(llm).has_work
    llm.shutdown()
    done.sort(key=lambda one: one.number)
    stays = [all(answer.finished for answer in one.output.outputs) for one in done]
    assert min(stays.count(True), stays.count(False)) > 15
    for one, ended in zip(done, stays, strict=True):
        whole = expected[one.number]
        for answer, other in zip(one.output.outputs, whole.outputs, strict=True):
            # Sums of log-probabilities are not streamed.
            answer.cumulative_logprob = other.cumulative_logprob
            if not ended:
                assert other.token_ids[: len(answer.token_ids)] == answer.token_ids
                assert other.text.startswith(answer.text)
    require_equal(
        [one for one, ended in zip(expected, stays, strict=True) if ended],
        [one.output for one, ended in zip(done, stays, strict=True) if ended],
    )
    assert log.num_drafts > 200
    assert 0 < log.num_accepted < log.num_drafts


@pytest.fixture(scope="module")
def model(folders: tuple[Path, Path]) -> Llama:
    return Llama(folders[0])


@pytest.fixture(scope="module")
def expected_on_gpu(folders: tuple[Path, Path]) -> list[RequestOutput]:
    llm = LLM(str(folders[0]), **SETTINGS | {"device": "cuda", "num_threads": None})
    found = run(llm)
    llm.shutdown()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize("drafter", ["ngram", "itself", "other", "eagle"])
def test_drafts_change_nothing_on_a_gpu(
    folders, model, expected_on_gpu, tmp_path, drafter: str, enforce_eager: bool
):
    """Tokens are the same, or differ first where two were almost equal."""
    settings = SETTINGS | {"device": "cuda", "num_threads": None, "enforce_eager": enforce_eager}
    config = speculation(drafter, folders, tmp_path)
    llm = LLM(str(folders[0]), **settings, swap_space=0.001, speculative_config=config)
    with logged_steps(llm) as log:
        found = run(llm)
    assert bool(engines.graphs(llm)) == (not enforce_eager)
    llm.shutdown()
    num_ties = require_equal_or_near_ties(model, random_requests()[1], expected_on_gpu, found)
    assert num_ties <= NUM_REQUESTS // 40
    assert log.num_drafts > 300
    # A drafter's model regards no penalties, biases and grammars.
    assert log.acceptance_rate >= {"ngram": 0.02, "itself": 0.4}.get(drafter, 0)
    require_allowed_drafts(log)
    assert sum(len(step.new_rows) for step, _ in log.steps) > sum(len(x.outputs) for x in found)


def test_scores_are_greatest_for_tokens_of_the_engine(model, expected):
    """The scores that decide what a near-tie is, after each token of some answers on a CPU."""
    num_tokens, temperatures = 0, set()
    prompts, params = random_requests()
    for prompt, param, output in zip(prompts, params, expected, strict=True):
        excludes = param.structured_outputs or param.allowed_token_ids or param.bad_words
        if excludes or param.min_tokens or param.top_k or param.top_p < 1 or param.min_p:
            continue
        answer = output.outputs[-1]
        tokens = list(answer.token_ids)
        logits = model.logits(prompt + tokens)[len(prompt) - 1 :]
        for at, token in enumerate(tokens):
            found = scores(
                logits[at], param, prompt, tokens[:at], answer_seed(param.seed, answer.index)
            )
            assert found.argmax() == token
        num_tokens += len(tokens)
        temperatures.add(param.temperature)
    assert num_tokens > 200
    assert temperatures == {0.0, 0.3, 1.0}


@pytest.mark.parametrize(
    ("gap", "logprob", "message"),
    [(NEAR / 2, 0.0, ""), (NEAR * 2, 0.0, "no near-tie"), (0.0, NEAR * 2, "log-probabilities")],
)
def test_near_ties_are_not_other_differences(gap, logprob, message):
    """Made-up answers that differ in their second token, of which one is likelier by `gap`."""
    logits = torch.tensor([[0.0, 3.0, 3.0 - gap, 1.0]])
    model = SimpleNamespace(logits=lambda tokens: logits)
    one, other = (
        CompletionOutput(0, token_ids=[3, token, 0], logprobs=[{3: Logprob(value, 3, "d")}])
        for token, value in ((1, -2.0), (2, -2.0 + logprob))
    )
    params = SamplingParams(temperature=0.0, seed=0)
    compare = partial(require_equal_or_near_tie, model, [0], params)
    if message:
        with pytest.raises(AssertionError, match=message):
            compare(one, other)
        return
    assert compare(one, one)
    assert not compare(one, other)
