"""Prompts that must be computed in one step."""

from __future__ import annotations

import numpy as np

from toolkit.sampling.params import PoolingParams, SamplingParams
from toolkit.scheduler import ModelOutput, Request, Scheduler
from toolkit.sequence import SequenceSpec


def steps(lengths: list[int], budget: int, num_rows: int = 8) -> list[list[int]]:
    """Return the tokens of each request in each step, until all have ended."""
    scheduler = Scheduler(
        num_blocks=num_rows,
        block_size=64,
        max_num_seqs=num_rows,
        max_num_batched_tokens=budget,
        max_model_len=64,
        enable_prefix_caching=False,
        chunks_prompts=False,
    )
    for number, length in enumerate(lengths):
        scheduler.add(
            Request(
                id=str(number),
                spec=SequenceSpec(
                    prompt_token_ids=[1] * length,
                    params=SamplingParams(max_tokens=1),
                    max_tokens=1,
                    eos_token_ids=[],
                    pooling=PoolingParams(),
                ),
                cacheable=False,
            )
        )
    seen = []
    while scheduler.num_unfinished:
        step = scheduler.schedule()
        assert step is not None
        assert step.samples.all()
        assert (step.num_computed == 0).all()
        seen.append(step.num_tokens.tolist())
        scheduler.update(step, ModelOutput(step.step, np.zeros(len(step.rows), np.int32)))
    return seen


def test_a_prompt_that_does_not_fit_waits_for_the_next_step():
    assert steps([5, 6, 7, 3], budget=12) == [[5, 6], [7, 3]]


def test_a_prompt_longer_than_a_step_runs_alone():
    assert steps([4, 30, 4], budget=10) == [[4], [30], [4]]


def test_a_step_has_no_more_prompts_than_there_are_rows():
    assert steps([1] * 5, budget=100, num_rows=2) == [[1, 1], [1, 1], [1]]


def test_a_prompt_of_the_maximum_length_runs():
    assert steps([64], budget=64) == [[64]]
