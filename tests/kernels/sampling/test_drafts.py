"""Kernels of steps that verify drafts: the definition against examples, others against it."""

from __future__ import annotations

import random
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from toolkit.kernels import drafts as reference
from toolkit.kernels.drafts import LATER, SAMPLES, DraftInputs, Points
from toolkit.kernels.table import CPUKernels

NUM_ROWS, WIDTH = 9, 3000
Table = ModuleType | CPUKernels


@pytest.fixture(scope="session")
def drafts(triton) -> ModuleType:
    from toolkit.kernels.triton.sampling import drafts

    return drafts


def ints(values: object, device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def points_of(
    starts: Tensor, ends: Tensor, num_points: int, device: torch.device | str = "cpu"
) -> Points:
    """Return points that are not located yet, with arbitrary contents."""
    tokens = torch.full((num_points,), 77, dtype=torch.int64, device=device)
    rows, positions = torch.full((2, num_points), 77, dtype=torch.int32, device=device)
    return Points(starts, ends, torch.full_like(ends, 77), tokens, rows, positions)


def test_points_of_a_step():
    """Two drafts in row 2, a part of a prompt in row 0, no draft in row 1, and padding."""
    points = points_of(ints([0, 3, 4, 5, 5]), ints([SAMPLES, 40, LATER, 0]), 7)
    starts, lengths = ints([0, 3, 23, 24, 24]), ints([77, 5, 10, 0])
    found = torch.full((7,), 77, dtype=torch.int32)
    reference.locate_points(
        points, ints([2, 0, 1, 3]), starts, lengths, (ints([4, 5, 6, 7]), found)
    )
    assert points.seq_lens.tolist() == [12, 40, 5, 0]
    assert points.tokens.tolist() == [0, 1, 2, 22, 23, 0, 0]
    assert points.rows.tolist() == [2, 2, 2, 0, 1, 3, 3]
    assert points.positions.tolist() == [10, 11, 12, -1, 5, -1, -1]
    assert found.tolist() == [4, 4, 4, 5, 6, -1, -1]


def test_right_drafts_are_kept():
    """Drafts 8 and 9 after row 0's 3 tokens; the second is wrong. Row 1 samples later."""
    points = points_of(ints([0, 3, 4]), ints([SAMPLES, LATER]), 4)
    token_ids, lengths = ints([[1, 2, 3, 8, 9, 5], [4, 0, 0, 0, 0, 0]]), ints([3, 1])
    rows, counts = ints([0, 1]), ints([77, 77])
    reference.locate_points(points, rows, ints([0, 3, 4]), lengths)
    sampled = ints([8, 7, 6, -1])
    reference.accept_drafts(points, SAMPLES, rows, sampled, token_ids, lengths, counts, 3)
    assert (counts.tolist(), lengths.tolist()) == ([2, 77], [5, 1])
    assert token_ids.tolist() == [[1, 2, 3, 8, 7, 5], [4, 0, 0, 0, 0, 0]]
    reference.accept_drafts(points, LATER, rows, sampled, token_ids, lengths, counts, 3)
    assert (counts.tolist(), lengths.tolist()) == ([2, 1], [5, 2])


def unfilled(num_reqs: int, device: torch.device | str = "cpu") -> DraftInputs:
    """Return outputs with arbitrary contents."""
    numbers = torch.full((4, num_reqs), 77, dtype=torch.int32, device=device)
    slots = torch.full((num_reqs,), 77, dtype=torch.int64, device=device)
    return DraftInputs(numbers[0], numbers[1], slots, numbers[2], numbers[3])


@pytest.mark.parametrize("ahead", [0, 1])
def test_inputs_before_the_second_draft(ahead: int):
    """Row 2 has 3 tokens and a draft, row 0 has no position left, row 1 is in its prompt.

    The draft that row 0 lacks is token 0."""
    out, table = unfilled(3), ints([[0, 0, 0], [0, 0, 0], [6, 5, 4]])
    token_ids = ints([[1] * 8, [2] * 8, [7, 8, 9, 3, 5, 5, 5, 5]])
    lengths = ints([5, 2, 3])
    reference.draft_inputs(
        ints([SAMPLES, LATER, 2]), ints([2, 0, 1]), lengths, token_ids, table, 2, 1, ahead, 6, out
    )
    position = 3 - ahead
    assert out.token_ids.tolist() == [3, 0, 0]
    assert out.positions.tolist() == [position, 0, 0]
    assert out.slots.tolist() == [2 * 5 + position - 2, -1, -1]
    assert out.seq_lens.tolist() == [position + 1, 1, 1]
    assert out.sample_positions.tolist() == [4, -1, -1]
    assert token_ids.tolist() == [[1] * 6 + [0, 1], [2] * 8, [7, 8, 9, 3, 5, 5, 5, 5]]


@pytest.mark.on_cpu("0-0", "200-1")
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("padding", [0, 200])
def test_inputs_before_drafts_equal_reference(drafts, device, ahead: int, padding: int):
    require_equal_inputs(drafts, device, ahead, padding)


@pytest.mark.parametrize("ahead", [0, 1])
def test_cpu_inputs_before_drafts_equal_reference(ahead: int):
    require_equal_inputs(CPUKernels(), torch.device("cpu"), ahead, 200)


def require_equal_inputs(drafts: Table, device: torch.device, ahead: int, padding: int) -> None:
    rng = random.Random(ahead)
    block_size, limit = 4, 100
    token_ids = torch.randint(1, 900, (NUM_ROWS, 102), dtype=torch.int32, device=device)
    table = torch.randperm(NUM_ROWS * 30, device=device).to(torch.int32).view(NUM_ROWS, 30)
    rows = [*rng.sample(range(NUM_ROWS - 1), NUM_ROWS - 1), *[NUM_ROWS - 1] * padding]
    ends = [rng.choice([SAMPLES, LATER, 30]) for _ in range(NUM_ROWS - 1)] + [0] * padding
    for nth in range(4):
        lengths = ints([rng.choice([2, 17, 40, 97, 98, 99, 100]) for _ in range(NUM_ROWS)], device)
        found, expected = (unfilled(len(rows), device) for _ in range(2))
        step = ints(ends, device), ints(rows, device), lengths
        tokens, more = token_ids.clone(), (table, block_size, nth, ahead, limit)
        drafts.draft_inputs(*step, tokens, *more, found)
        reference.draft_inputs(*step, token_ids, *more, expected)
        assert torch.equal(tokens, token_ids)
        assert [one.tolist() for one in found] == [one.tolist() for one in expected]


def test_drafts_that_are_not_found_are_token_0():
    """Row 0 ends as it did before; row 1 did not, and has room for one draft."""
    points = points_of(ints([0, 1, 2]), ints([SAMPLES, SAMPLES]), 2)
    token_ids, lengths = ints([[4, 5, 6, 4, 5, 9, 9], [1, 2, 3, 4, 5, 6, 9]]), ints([5, 6])
    nothing, found = ints([0, 0]), ints([[77] * 2] * 2)
    reference.look_up_drafts(
        points, SAMPLES, ints([0, 1]), token_ids, lengths, nothing, ints([[], []]), nothing,
        found, 2, 4,
    )  # fmt: skip
    assert found.tolist() == [[6, 4], [-1, -1]]
    assert token_ids.tolist() == [[4, 5, 6, 4, 5, 6, 4], [1, 2, 3, 4, 5, 6, 0]]


def test_kernels_equal_reference(drafts, device):
    require_equal_steps(drafts, device)


def test_cpu_kernels_equal_reference():
    require_equal_steps(CPUKernels(), torch.device("cpu"))


def require_equal_steps(drafts: Table, device: torch.device) -> None:
    """Compare steps of random requests.

    They have few different tokens, so that drafts are often right."""
    rng = random.Random(0)
    generator = np.random.default_rng(0)
    for trial in range(8):
        most, padding = rng.choice([1, 2, 5, 8]), rng.choice([0, 3, 130])
        tokens = generator.integers(0, 2 if trial % 2 else 4, (2, NUM_ROWS, WIDTH))
        token_ids, predictions = (ints(x, device) for x in tokens)
        lengths = ints([rng.choice([1, 2, 7, 2500, WIDTH - most]) for _ in range(NUM_ROWS)], device)
        num_prompt = torch.tensor([[0, rng.randint(0, n)] for n in lengths.tolist()], device=device)
        predicted = ints([rng.choice([0, 0, 3, 2500]) for _ in range(NUM_ROWS)], device)
        for row in range(0, NUM_ROWS, 3):  # outputs that begin their prediction
            prompt = int(num_prompt[row, 1])
            predictions[row, : WIDTH - prompt] = token_ids[row, prompt:]
        rows = rng.sample(range(NUM_ROWS - 1), rng.randint(1, NUM_ROWS - 1))
        ends = [rng.choice([SAMPLES, SAMPLES, LATER, 30]) for _ in rows]
        numbers = [rng.randint(1, most) if end < 0 else 1 for end in ends]
        counts = [
            n + rng.randint(0, 20) if end > 0 else n for n, end in zip(numbers, ends, strict=True)
        ]
        starts, query_starts = (np.cumsum([0, *x, *[0] * padding]) for x in (numbers, counts))
        num_points = int(starts[-1]) + padding
        rows_there = ints(rows + [NUM_ROWS - 1] * padding, device)
        adapters = torch.arange(len(rows_there), dtype=torch.int32, device=device) % 3 - 1
        states = []
        for module in (reference, drafts):
            points = points_of(
                ints(starts, device), ints(ends + [0] * padding, device), num_points, device
            )
            state, held = token_ids.clone(), lengths.clone()
            of_points = torch.full_like(points.rows, 77)
            module.locate_points(
                points, rows_there, ints(query_starts, device), held, (adapters, of_points)
            )
            sampled = torch.where(points.rows % 4 == 0, -1, 1).to(torch.int32)
            found = torch.full_like(rows_there, 77)
            drafted = torch.full((len(rows_there), most + 1), 77, dtype=torch.int32, device=device)
            for when in (SAMPLES, LATER):
                module.accept_drafts(points, when, rows_there, sampled, state, held, found, most)
                module.look_up_drafts(
                    points, when, rows_there, state, held, num_prompt[:, 1], predictions,
                    predicted, drafted, 2, 4,
                )  # fmt: skip
            states.append([*points, of_points, state, held, found, drafted])
        for expected, one in zip(*states, strict=True):
            assert torch.equal(expected, one)
