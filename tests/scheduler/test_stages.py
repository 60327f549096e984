"""Steps for several stages in a row: as many in flight as there are stages, of different requests."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from tests.scheduler.simulation import make_request
from toolkit.scheduler import ModelOutput, Scheduler, SchedulerOutput


def scheduler_of(num_stages: int, *, budget: int = 100, max_num_seqs: int = 16) -> Scheduler:
    return Scheduler(
        num_blocks=100,
        block_size=4,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=100,
        num_stages=num_stages,
    )


def add(scheduler: Scheduler, count: int, prompt: int = 5) -> None:
    for index in range(count):
        request = make_request(f"{index}", [2 + index] * prompt, max_tokens=40, ignore_eos=True)
        request.number = index
        scheduler.add(request)


def token_of(row: int, position: int) -> int:
    return 1000 * row + position


def answer(step: SchedulerOutput) -> ModelOutput:
    ends = (step.num_computed + step.num_tokens)[step.samples]
    tokens = [
        token_of(*at) for at in zip(step.rows[step.samples].tolist(), ends.tolist(), strict=True)
    ]
    return ModelOutput(step.step, np.array(tokens, np.int32))


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_every_stage_has_an_equal_share_of_the_requests_and_each_is_in_one_step(
    num_stages: int, count: int
) -> None:
    """From the second round on; what comes is shared out, too."""
    scheduler = scheduler_of(num_stages)
    add(scheduler, count)
    flying: deque[SchedulerOutput] = deque()
    for turn in range(36):
        while len(flying) < num_stages and (step := scheduler.schedule()) is not None:
            flying.append(step)
        rows = [row for step in flying for row in step.rows.tolist()]
        assert len(set(rows)) == len(rows), "in one step at most"
        assert len(rows) == count, "nobody waits while a step could be made"
        assert len(flying) == min(num_stages, count) or turn < num_stages
        assert max(len(step.rows) for step in flying) <= -(-count // num_stages)
        step = flying.popleft()
        scheduler.update(step, answer(step))


def test_a_step_brings_the_tokens_that_were_sampled_since() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, 3)
    flying: deque[SchedulerOutput] = deque()
    for _ in range(40):
        while len(flying) < 2 and (step := scheduler.schedule()) is not None:
            ends = (step.num_computed + step.num_tokens)[step.samples].tolist()
            rows = step.rows[step.samples].tolist()
            newest = [
                token_of(row, end - 1) if end > 5 else 2 + row
                for row, end in zip(rows, ends, strict=True)
            ]
            assert sorted(step.last_tokens.tolist()) == sorted(newest)
            flying.append(step)
        step = flying.popleft()
        scheduler.update(step, answer(step))


def test_parts_of_a_prompt_follow_each_other_without_waiting() -> None:
    scheduler = scheduler_of(3, budget=4)
    add(scheduler, 1, prompt=10)
    steps = [scheduler.schedule() for _ in range(4)]
    assert [step and step.num_computed.tolist() for step in steps] == [[0], [4], [8], None]
    assert [step and step.samples.tolist() for step in steps[:3]] == [[False], [False], [True]]
    first, second, third = (step for step in steps if step is not None)
    for step in (first, second):
        scheduler.update(step, answer(step))
        assert scheduler.schedule() is None, "its token has not come back"
    scheduler.update(third, answer(third))
    assert scheduler.schedule() is not None


def test_a_prompt_in_parts_takes_no_place_from_those_that_decode() -> None:
    """Each step has its share of them and the next part."""
    scheduler = scheduler_of(2, budget=8)
    add(scheduler, 4, prompt=1)
    flying: deque[SchedulerOutput] = deque()
    late = make_request("late", [9] * 60, max_tokens=4, ignore_eos=True)
    for turn in range(16):
        if turn == 8:
            scheduler.add(late)
        while len(flying) < 2 and (step := scheduler.schedule()) is not None:
            flying.append(step)
            if turn == 8:
                assert sorted(step.num_tokens.tolist()) in ([1, 1, 6], [1, 1])
            elif 8 < turn < 15:
                assert sorted(step.num_tokens.tolist()) == [1, 1, 6]
        step = flying.popleft()
        scheduler.update(step, answer(step))
