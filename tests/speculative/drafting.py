"""Engines that draft: what their steps computed, and answers to compare."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from tests import engines
from tests.checkpoints import make_model, save
from tests.server import INSIDE, hook_environment
from toolkit import LLM, SamplingParams
from toolkit.scheduler import ModelOutput, SchedulerOutput

LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
SETTINGS = {
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "kv_cache_memory": 0.02,
    "max_num_seqs": 8,
}


def save_llama(folder: Path, seed: int = 0, **changes: object) -> Path:
    return save(make_model("Llama", LLAMA | changes, seed), folder)


def drafting_engine(
    model: Path,
    drafter: Path | None,
    method: str = "draft_model",
    most: int = 3,
    **settings: object,
) -> LLM:
    """Load a model with a drafter, or without one."""
    config = None
    if drafter is not None:
        config = {"method": method, "model": str(drafter), "num_speculative_tokens": most}
    given = SETTINGS | {"speculative_config": config} | settings
    with few_measured_steps():
        return LLM(str(model), **given)


@contextmanager
def few_measured_steps() -> Iterator[None]:
    """Measure steps of one request and of all at startup. No test depends on what they take.

    All ranks measure the same steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.worker.startup.warm_up.STEP_SIZES", (1,))
        for name, value in (hook_environment(INSIDE) | {"TEST_STEPS": "few"}).items():
            patch.setenv(name, value)
        yield


@dataclass
class StepLog:
    """Steps with their results, in order."""

    steps: list[tuple[SchedulerOutput, ModelOutput]] = field(default_factory=list)

    @property
    def num_drafts(self) -> int:
        return sum(int(step.num_drafts.sum()) for step, _ in self.steps)

    @property
    def num_accepted(self) -> int:
        outputs = [output for _, output in self.steps if output.counts is not None]
        return sum(int((output.counts - 1).sum()) for output in outputs)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / max(1, self.num_drafts)

    @property
    def drafts(self) -> list[np.ndarray]:
        """[num_sampled, most] of each step that sampled."""
        return [output.drafts for _, output in self.steps if output.drafts is not None]


@contextmanager
def logged_steps(llm: LLM) -> Iterator[StepLog]:
    """Log the steps of an engine in this process."""
    runner = engines.runner(llm)
    execute, log = runner.execute, StepLog()

    def logging(step: SchedulerOutput) -> object:
        pending = execute(step)
        result = pending.result

        def logged() -> ModelOutput:
            log.steps.append((step, result()))
            return log.steps[-1][1]

        pending.result = logged
        return pending

    runner.execute = logging
    try:
        yield log
    finally:
        del runner.execute


def random_prompts(count: int, length: int = 20, seed: int = 0) -> list[list[int]]:
    return np.random.default_rng(seed).integers(0, 256, (count, length)).tolist()


@dataclass(frozen=True)
class Answer:
    """An answer. Log-probabilities are equal up to rounding."""

    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[dict[int, float]]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Answer)
        same = (self.token_ids, self.finish_reason) == (other.token_ids, other.finish_reason)
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        return same and all(one == pytest.approx(two, abs=1e-4) for one, two in pairs)


def answers(llm: LLM, prompts: list[list[int]], **params: object) -> list[Answer]:
    """Complete prompts together."""
    settings = SamplingParams(**params)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], settings, use_tqdm=False)
    found = []
    for (answer,) in (output.outputs for output in outputs):
        logprobs = [
            {token: one.logprob for token, one in position.items()}
            for position in answer.logprobs or ()
        ]
        found.append(Answer(list(answer.token_ids), answer.finish_reason, logprobs))
    return found
