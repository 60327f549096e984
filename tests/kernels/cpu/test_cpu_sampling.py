"""Sampling on CPUs, against the reference and against the sampler in PyTorch."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch

from tests.checkpoints import spec_of
from tests.sampled import choose, load_rows
from toolkit.kernels import cpu, reference
from toolkit.kernels.cpu.sampling import sample
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.sampling_state import SamplingState

pytestmark = pytest.mark.skipif(not cpu.available(), reason=str(cpu.problem()))

NUM_ROWS = 16 if "SANITIZED_KERNELS" in os.environ else 60
"""Rows to filter. Few reach the same memory as many, and sanitized kernels are slow."""
FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]


def make_state(params: list[SamplingParams]) -> SamplingState:
    """Return a state whose row i has the i-th parameters and its own seed."""
    state = SamplingState(len(params), torch.device("cpu"))
    for row, one in enumerate(params):
        state.set(row, spec_of(one), (row + 1) * 0x1234567887654321 % 2**63)
    load_rows(state)
    return state


def positions_of(count: int) -> torch.Tensor:
    return torch.arange(3, 3 + 7 * count, 7, dtype=torch.int32)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("vocab", [1, 5, 61, 256, 1000, 50_257])
def test_tokens_equal_reference(vocab: int, variant: str) -> None:
    torch.manual_seed(vocab)
    params = [SamplingParams(temperature=t) for t in (0.0, 0.6, 1.0, 0.01, 0.0, 2.0)] * 4
    state = make_state(params)
    logits = torch.randn(len(params), vocab) * 3
    rows, positions = torch.randperm(len(params)).int(), positions_of(len(params))
    with cpu.using(variant):
        found = sample(logits, rows, positions, state.floats, state.ints)
    expected = [
        reference.choose(
            row, *state.floats[r, :1].tolist(), 0, 1.0, 0.0, seed=int(state.ints[r, 1]), position=p
        )
        for row, r, p in zip(logits, rows.tolist(), positions.tolist(), strict=True)
    ]
    assert found.tolist() == expected


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filtered_tokens_equal_pytorch(filters: dict[str, float], variant: str) -> None:
    torch.manual_seed(0)
    for vocab in (40, 3000):
        params = SamplingParams(temperature=0.8, **filters)  # type: ignore[arg-type]
        state = make_state([params] * NUM_ROWS)
        rows, positions = np.arange(NUM_ROWS, dtype=np.int32), positions_of(NUM_ROWS)
        logits = torch.randn(NUM_ROWS, vocab) * 3
        logits[:, ::7] = -torch.inf
        expected = choose(logits, state, rows, positions.numpy())
        with cpu.using(variant):
            found = sample(logits, torch.from_numpy(rows), positions, state.floats, state.ints)
        assert found.equal(expected)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_equal_logits_are_kept_or_dropped_together(filters: dict[str, float], variant: str) -> None:
    """Filters do not depend on the order in which equal logits are sorted."""
    torch.manual_seed(0)
    params = SamplingParams(temperature=1.0, **filters)  # type: ignore[arg-type]
    state = make_state([params] * 300)
    rows, positions = np.arange(300, dtype=np.int32), positions_of(300)
    logits = torch.randint(0, 4, (1, 90)).float().log2().expand(300, -1).contiguous()
    expected = choose(logits, state, rows, positions.numpy())
    with cpu.using(variant):
        found = sample(logits, torch.from_numpy(rows), positions, state.floats, state.ints)
    assert found.equal(expected)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("count", [1, 2, 6, 300])
def test_filters_with_few_finite_logits(count: int, variant: str) -> None:
    """All are close to each other, and top-k may exceed their number."""
    torch.manual_seed(count)
    params = [SamplingParams(**filters) for filters in FILTERS]  # type: ignore[arg-type]
    params *= NUM_ROWS // 10
    state = make_state(params)
    rows, positions = np.arange(len(params), dtype=np.int32), positions_of(len(params))
    logits = torch.full((len(params), 5000), -torch.inf)
    logits[:, 1000 : 1000 + count] = torch.randn(len(params), count).round()
    expected = choose(logits, state, rows, positions.numpy())
    with cpu.using(variant):
        found = sample(logits, torch.from_numpy(rows), positions, state.floats, state.ints)
    assert found.equal(expected)


@pytest.mark.parametrize("variant", cpu.variants())
def test_draws_follow_the_probabilities(variant: str) -> None:
    torch.manual_seed(0)
    count = 20_000
    state = make_state([SamplingParams(temperature=1.0)])
    logits = torch.randn(1, 30)
    with cpu.using(variant):
        tokens = sample(
            logits.repeat(count, 1),
            torch.zeros(count, dtype=torch.int32),
            torch.arange(count, dtype=torch.int32),
            state.floats,
            state.ints,
        )
    expected = logits[0].softmax(0) * count
    statistic = float(((tokens.bincount(minlength=30) - expected).square() / expected).sum())
    assert statistic < 29 + 4 * math.sqrt(2 * 29)


@pytest.mark.parametrize("variant", cpu.variants())
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_yield_no_token(temperature: float, variant: str) -> None:
    vocab = 1000
    rows = [torch.zeros(vocab) for _ in range(6)]
    rows[0][3] = torch.nan
    rows[1][-1] = torch.nan
    rows[2][500] = torch.inf
    rows[3][:] = -torch.inf
    rows[4][:] = -torch.inf
    rows[4][777] = -1e30
    rows[5][:-1] = -torch.inf
    state = make_state([SamplingParams(temperature=temperature)] * 6)
    with cpu.using(variant):
        found = sample(
            torch.stack(rows),
            torch.arange(6, dtype=torch.int32),
            positions_of(6),
            state.floats,
            state.ints,
        )
    assert found.tolist() == [-1, -1, -1, -1, 777, vocab - 1]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [1234, 4321]] = 2.0
    state = make_state([SamplingParams(temperature=0.0)])
    one = torch.zeros(1, dtype=torch.int32)
    assert sample(logits, one, one, state.floats, state.ints).tolist() == [1234]


def test_unsupported_inputs_are_errors() -> None:
    state = make_state([SamplingParams()])
    one = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="must be in float32"):
        sample(torch.zeros(1, 4).bfloat16(), one, one, state.floats, state.ints)
    with pytest.raises(ValueError, match="one entry per row"):
        sample(torch.zeros(2, 4), one, one, state.floats, state.ints)
    with pytest.raises(ValueError, match="contiguous"):
        sample(torch.zeros(1, 8)[:, ::2], one, one, state.floats, state.ints)
