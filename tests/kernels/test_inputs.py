"""Kernels that expand a step's inputs: the reference against examples, others against it."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch
from torch import Tensor

from toolkit.kernels import reference
from toolkit.kernels.table import CPUKernels

Table = ModuleType | CPUKernels


@pytest.fixture(scope="session")
def inputs(triton) -> ModuleType:
    from toolkit.kernels.triton import inputs

    return inputs


def unfilled(num_tokens: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs with arbitrary contents: token ids, positions and slots."""
    ids, positions = torch.full((2, num_tokens), 77, dtype=torch.int32, device=device)
    return ids, positions, torch.full((num_tokens,), 77, dtype=torch.int64, device=device)


def test_reference_expands_a_step():
    """Three of five tokens in row 2, a request without tokens, one token in row 0, and padding."""
    token_ids = torch.tensor([[7, 0, 0, 0, 0], [1, 1, 1, 1, 1], [10, 11, 12, 13, 14]])
    block_table = torch.tensor([[8, 0, 0], [1, 1, 1], [5, 3, 9]])
    rows, starts, lengths = (
        torch.tensor([2, 1, 0]),
        torch.tensor([0, 3, 3, 4]),
        torch.tensor([5, 0, 1]),
    )
    out = unfilled(6)
    reference.expand_inputs(rows, starts, lengths, token_ids, block_table, 2, out)
    assert [x.tolist() for x in out] == [
        [12, 13, 14, 7, 0, 0],
        [2, 3, 4, 0, 0, 0],
        [2 * 3, 2 * 3 + 1, 2 * 9, 2 * 8, -1, -1],
    ]
    shifted = torch.full((6,), 77)
    shifts = torch.tensor([5, 6, -1]), shifted
    reference.expand_inputs(rows, starts, lengths, token_ids, block_table, 2, out, shifts=shifts)
    assert shifted.tolist() == [1, 2, 3, 5, 0, 0]
    lengths -= torch.tensor([1, 0, 0])
    reference.expand_inputs(rows, starts, lengths, token_ids, block_table, 2, out, ahead=1)
    assert out[0].tolist() == [12, 13, 14, 0, 0, 0]
    assert out[1].tolist() == [1, 2, 3, 0, 0, 0]


def test_reference_copies_runs():
    target = torch.zeros(3, 4, dtype=torch.int32)
    runs = torch.tensor([(2, 1, 3, 2), (0, 0, 0, 3), (1, 2, 1, 0)])
    reference.copy_runs(target, runs, torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32), 3)
    assert target.tolist() == [[1, 2, 3, 0], [0, 0, 0, 0], [0, 4, 5, 0]]


@pytest.mark.on_cpu("padding0-0", "padding0-3", "padding1-1", "padding2-2")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding", [(0, 0), (3, 17), (130, 70)])
def test_expand_inputs_equals_reference(inputs, device, seed, padding):
    require_equal_inputs(inputs, device, seed, padding)


@pytest.mark.parametrize(("seed", "padding"), [(0, (0, 0)), (1, (3, 17)), (2, (130, 70))])
def test_cpu_inputs_equal_reference(seed, padding):
    require_equal_inputs(CPUKernels(), torch.device("cpu"), seed, padding)


def require_equal_inputs(
    inputs: Table, device: torch.device, seed: int, padding: tuple[int, int]
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    block_size, width, num_rows = rng.choice([1, 5, 16]), 200, 9
    token_ids = torch.randint(1, 1000, (num_rows, width), dtype=torch.int32, device=device)
    table = torch.randperm(num_rows * width, device=device).to(torch.int32).view(num_rows, width)
    rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
    counts = [rng.choice([1, 1, 2, 63, 64, 90]) for _ in rows]
    lengths = [rng.randint(count, width) for count in counts]
    more_reqs, more_tokens = padding

    starts = torch.tensor([0, *counts]).cumsum(0)
    packed = [
        torch.tensor(rows + [num_rows - 1] * more_reqs),
        torch.cat((starts, starts[-1:].repeat(more_reqs))),
        torch.tensor(lengths + [0] * more_reqs),
    ]
    step = (*(x.to(device, torch.int32) for x in packed), token_ids, table, block_size)
    found, expected = (unfilled(sum(counts) + more_tokens, device) for _ in range(2))
    adapters = torch.arange(len(packed[0]), dtype=torch.int32, device=device) % 3 - 1
    of_tokens, shifted = torch.full((2, 2, len(found[0])), 77, dtype=torch.int32, device=device)
    shifts = -torch.arange(num_rows, dtype=torch.int32, device=device)
    for ahead in (1, 0):
        if ahead and max(lengths) == width:
            continue
        given = (adapters, of_tokens[0]), ahead, (shifts, shifted[0])
        inputs.expand_inputs(*step, found, *given)
        given = (adapters, of_tokens[1]), ahead, (shifts, shifted[1])
        reference.expand_inputs(*step, expected, *given)
        assert [x.tolist() for x in found] == [x.tolist() for x in expected]
    assert of_tokens[0][: sum(counts)].tolist() == of_tokens[1][: sum(counts)].tolist()
    assert shifted[0].tolist() == shifted[1].tolist()


def test_copy_runs_equals_reference(inputs, device):
    require_equal_runs(inputs, device)


def test_cpu_runs_equal_reference():
    require_equal_runs(CPUKernels(), torch.device("cpu"))


def require_equal_runs(inputs: Table, device: torch.device) -> None:
    target = torch.full((4, 3000), -1, dtype=torch.int32, device=device)
    values = torch.arange(2502, dtype=torch.int32, device=device)
    runs = [(2, 5, 0, 2500), (0, 0, 2500, 1), (3, 2999, 2501, 1), (1, 7, 40, 0)]
    runs = torch.tensor(runs, dtype=torch.int32, device=device)
    expected = target.clone()
    inputs.copy_runs(target, runs, values, 2500)
    reference.copy_runs(expected, runs, values, 2500)
    assert torch.equal(target, expected)
    single = runs[runs[:, 3] == 1]
    inputs.copy_runs(target, single, values + 7, 1)
    reference.copy_runs(expected, single, values + 7, 1)
    assert torch.equal(target, expected)
