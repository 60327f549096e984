"""The kernels that expand a step's few numbers, against loops in Python."""

from __future__ import annotations

import random
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="session")
def inputs(triton_runs: bool) -> ModuleType:
    if not triton_runs:
        pytest.skip("Triton was imported without its interpreter: see test_attention")
    from toolkit.kernels.triton import inputs

    return inputs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding", [(0, 0), (3, 17), (130, 70)])
def test_tokens_positions_and_slots_are_those_of_the_requests(inputs, device, seed, padding):
    rng = random.Random(seed)
    block_size, width, num_rows = rng.choice([1, 5, 16]), 200, 9
    token_ids = torch.randint(1, 1000, (num_rows, width), dtype=torch.int32, device=device)
    table = torch.randperm(num_rows * width, device=device).to(torch.int32).view(num_rows, width)
    rows = rng.sample(range(num_rows), rng.randint(1, num_rows))
    counts = [rng.choice([1, 1, 2, 63, 64, 90]) for _ in rows]
    lengths = [rng.randint(count, width) for count in counts]

    expected = []
    for row, count, length in zip(rows, counts, lengths, strict=True):
        for position in range(length - count, length):
            block = int(table[row, position // block_size])
            expected.append(
                (int(token_ids[row, position]), position, block * block_size + position % block_size)
            )
    more_reqs, more_tokens = padding
    expected += [(0, 0, -1)] * more_tokens

    starts = torch.tensor([0, *counts]).cumsum(0)
    packed = [
        torch.tensor(rows + [num_rows - 1] * more_reqs),
        torch.cat((starts, starts[-1:].repeat(more_reqs))),
        torch.tensor(lengths + [0] * more_reqs),
    ]
    out = tuple(
        torch.full((len(expected),), 77, dtype=dtype, device=device)
        for dtype in (torch.int32, torch.int32, torch.int64)
    )
    inputs.expand_inputs(*(x.to(device, torch.int32) for x in packed), token_ids, table, block_size, out)
    assert list(zip(*(x.tolist() for x in out), strict=True)) == expected


def test_runs_are_copied_to_their_rows_and_nowhere_else(inputs, device):
    target = torch.full((4, 3000), -1, dtype=torch.int32, device=device)
    lengths = [(2, 5, 2500), (0, 0, 1), (3, 2999, 1)]
    values = torch.arange(2502, dtype=torch.int32, device=device)
    runs, begin = [], 0
    expected = target.clone()
    for row, column, length in lengths:
        runs.append((row, column, begin, length))
        expected[row, column : column + length] = values[begin : begin + length]
        begin += length
    inputs.copy_runs(target, torch.tensor(runs, dtype=torch.int32, device=device), values, 2500)
    assert torch.equal(target, expected)
