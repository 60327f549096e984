"""Steps for pipeline stages: as many in flight as stages, with different requests."""

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


def test_kernels_that_a_step_compiled_are_counted() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, 1)
    step = scheduler.schedule()
    result = answer(step)
    result.num_compiled = 2
    scheduler.update(step, result)
    assert scheduler.take_stats().late_compilations == 2
    assert scheduler.take_stats().late_compilations == 0


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
def test_stages_share_requests_equally_and_disjointly(num_stages: int, count: int) -> None:
    """Holds from the second round on. New requests are distributed, too."""
    scheduler = scheduler_of(num_stages)
    add(scheduler, count)
    in_flight: deque[SchedulerOutput] = deque()
    for turn in range(36):
        while len(in_flight) < num_stages and (step := scheduler.schedule()) is not None:
            in_flight.append(step)
        rows = [row for step in in_flight for row in step.rows.tolist()]
        assert len(set(rows)) == len(rows), "in one step at most"
        assert len(rows) == count, "no request waits while a step is possible"
        assert len(in_flight) == min(num_stages, count) or turn < num_stages
        assert max(len(step.rows) for step in in_flight) <= -(-count // num_stages)
        step = in_flight.popleft()
        scheduler.update(step, answer(step))


def test_a_step_brings_the_tokens_sampled_since_the_last() -> None:
    scheduler = scheduler_of(2)
    add(scheduler, 3)
    in_flight: deque[SchedulerOutput] = deque()
    for _ in range(40):
        while len(in_flight) < 2 and (step := scheduler.schedule()) is not None:
            ends = (step.num_computed + step.num_tokens)[step.samples].tolist()
            rows = step.rows[step.samples].tolist()
            newest = [
                token_of(row, end - 1) if end > 5 else 2 + row
                for row, end in zip(rows, ends, strict=True)
            ]
            assert sorted(step.known_tokens[:, 2].tolist()) == sorted(newest)
            in_flight.append(step)
        step = in_flight.popleft()
        scheduler.update(step, answer(step))


def test_prompt_chunks_follow_each_other_without_waiting() -> None:
    scheduler = scheduler_of(3, budget=4)
    add(scheduler, 1, prompt=10)
    steps = [scheduler.schedule() for _ in range(4)]
    assert [step and step.num_computed.tolist() for step in steps] == [[0], [4], [8], None]
    assert [step and step.samples.tolist() for step in steps[:3]] == [[False], [False], [True]]
    first, second, third = (step for step in steps if step is not None)
    for step in (first, second):
        scheduler.update(step, answer(step))
        assert scheduler.schedule() is None, "its token is still in flight"
    scheduler.update(third, answer(third))
    assert scheduler.schedule() is not None


def test_prompt_chunks_displace_no_decoding_request() -> None:
    """Each step has its share of the decoding requests and the next prompt chunk."""
    scheduler = scheduler_of(2, budget=8)
    add(scheduler, 4, prompt=1)
    in_flight: deque[SchedulerOutput] = deque()
    late = make_request("late", [9] * 60, max_tokens=4, ignore_eos=True)
    for turn in range(16):
        if turn == 8:
            scheduler.add(late)
        while len(in_flight) < 2 and (step := scheduler.schedule()) is not None:
            in_flight.append(step)
            if turn == 8:
                assert sorted(step.num_tokens.tolist()) in ([1, 1, 6], [1, 1])
            elif 8 < turn < 15:
                assert sorted(step.num_tokens.tolist()) == [1, 1, 6]
        step = in_flight.popleft()
        scheduler.update(step, answer(step))
