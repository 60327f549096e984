"""Drafts of a row that are kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.checkpoints import spec_of
from toolkit import SamplingParams
from toolkit.scheduler import NewRow, SchedulerOutput
from toolkit.worker.batch_state import BatchState
from toolkit.worker.sample_points import SamplePoints


def step_of(num_tokens: list[int], num_drafts: list[int], samples: list[bool]) -> SchedulerOutput:
    rows = np.arange(len(num_tokens), dtype=np.int32)
    return SchedulerOutput(
        step=0,
        rows=rows,
        num_tokens=np.array(num_tokens, np.int32),
        num_computed=np.zeros_like(rows),
        samples=np.array(samples, np.bool_),
        num_drafts=np.array(num_drafts, np.int32),
    )


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_kept_up_to_the_first_wrong_draft(seed: int):
    rng = np.random.default_rng(seed)
    samples = rng.random(5) < 0.8
    samples[0] = True
    num_drafts = rng.integers(0, 5, 5) * samples
    num_drafts[0] = 2
    step = step_of((1 + num_drafts).tolist(), num_drafts.tolist(), samples.tolist())
    ends = rng.integers(20, 30, samples.sum()).astype(np.int32)
    points = SamplePoints.of(step, ends)
    tokens, drafts = rng.integers(0, 2, (2, len(points))).astype(np.int32)
    counts, kept = points.accepted(tokens, drafts)
    expected_counts, expected_kept, at, token = [], [], 0, 0
    for row in range(5):
        if samples[row]:
            of_row = range(at, at + 1 + num_drafts[row])
            end = ends[len(expected_counts)]
            assert points.positions[of_row].tolist() == [*range(end - num_drafts[row], end + 1)]
            assert points.tokens[of_row].tolist() == [*range(token, token + len(of_row))]
            right = 0
            while right < num_drafts[row] and tokens[at + right] == drafts[at + right]:
                right += 1
            expected_counts.append(1 + right)
            expected_kept += of_row[: 1 + right]
            at += len(of_row)
        token += 1 + num_drafts[row]
    assert counts.tolist() == expected_counts
    assert kept.tolist() == expected_kept


def test_what_earlier_steps_left_is_no_draft():
    """A step assumes three drafts, as the one before had, and there is one."""
    state = BatchState(1, 32, 4, torch.device("cpu"))
    spec = spec_of(SamplingParams(temperature=0.0), num_prompt_tokens=6)
    placing, step = step_of([], [], []), step_of([4], [3], [True])
    placing.new_rows = [NewRow(0, spec, 0, [], 0, [0, 1, 2])]
    state.apply(placing)

    def commit(*sampled: int) -> list[int]:
        points = SamplePoints.of(step, state.context_lens(step))
        counts = state.commit(points, torch.tensor(sampled, dtype=torch.int32))
        assert counts is not None
        return counts.tolist()

    state.put_drafts(step.rows, np.array([[7, 8, 9]], np.int32))
    assert commit(5, 1, 1, 1) == [1]
    state.put_drafts(step.rows, np.array([[8, -1, -1]], np.int32))
    assert commit(8, 9, 1, 1) == [2]
    assert state.lengths.tolist() == [9]
    assert state.token_ids[0, 6:9].tolist() == [5, 8, 9]
