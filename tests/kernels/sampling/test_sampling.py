"""Sampling: the reference against the CPU's sampler and statistics, Triton against it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints import spec_of
from tests.sampled import choose, load_rows, sample
from toolkit.kernels import reference
from toolkit.kernels.logprobs import logprobs as gather_logprobs
from toolkit.kernels.table import Kernels, TritonKernels
from toolkit.sampling import sampler
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.sampling_state import SamplingState

INF = float("inf")
NAN = float("nan")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 300, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 10**6, "top_p": 0.7},
    {"top_p": 0.95},
    {"top_p": 0.1},
    {"top_p": 1e-6},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"min_p": 0.05, "top_p": 0.9},
    {"top_k": 8, "min_p": 0.3},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 30.0, "top_p": 0.9},
    {"temperature": 1e-9, "top_k": 3},
]
CPU = torch.device("cpu")
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(scope="session")
def sampling(triton):
    from toolkit.kernels.triton.sampling.logprobs import logprobs
    from toolkit.kernels.triton.sampling.penalties import penalize
    from toolkit.kernels.triton.sampling.sampling import sample

    return SimpleNamespace(sample=sample, logprobs=logprobs, penalize=penalize)


@dataclass
class Step:
    """The sampling of a step. Entry i is for row `rows[i]` of the state, at `positions[i]`."""

    logits: Tensor
    rows: Tensor
    positions: Tensor
    floats: Tensor
    ints: Tensor
    token_ids: Tensor

    def run(self, module) -> Tensor:
        out = torch.full_like(self.rows, -99)
        module.sample(
            self.logits, self.rows, self.positions, self.floats, self.ints, self.token_ids, out
        )
        return out


def step(logits: Tensor, parameters: list[dict], seed: int = 0) -> Step:
    """Return one entry per row of logits, in shuffled rows of the state, at positions up to 40."""
    n, device = len(logits), logits.device
    torch.manual_seed(seed)
    rows = torch.randperm(n + 3)[:n]
    floats = torch.full((n + 3, 6), NAN)
    ints = torch.full((n + 3, 3), -1, dtype=torch.int64)
    for row, given in zip(rows.tolist(), parameters, strict=True):
        p = SamplingParams(**given)
        floats[row] = torch.tensor([p.temperature, p.top_p, p.min_p, 1.0, 0.0, 0.0])
        ints[row] = torch.tensor([p.top_k, int(torch.randint(-(2**63), 2**63 - 1, ())), 0])
    return Step(
        logits,
        rows.to(torch.int32).to(device),
        torch.randint(0, 41, (n,), dtype=torch.int32).to(device),
        floats.to(device),
        ints.to(device),
        torch.full((n + 3, 43), -7, dtype=torch.int32, device=device),
    )


def random_logits(
    n: int, vocab: int, dtype: torch.dtype, device: torch.device, scale: float = 3.0
) -> Tensor:
    torch.manual_seed(n * vocab)
    return (scale * torch.randn(n, vocab)).to(dtype).to(device)


def check(sampling, case: Step) -> Tensor:
    """Return the kernel's tokens, after comparing them, the state and the logits."""
    before, state = case.logits.clone(), case.token_ids.clone()
    expected = case.run(reference)
    expected_state = case.token_ids.clone()
    case.token_ids.copy_(state)
    actual = case.run(sampling)
    assert actual.tolist() == expected.tolist()
    assert torch.equal(case.token_ids, expected_state)
    torch.testing.assert_close(case.logits, before, rtol=0, atol=0, equal_nan=True)
    return actual


def assert_drawn_from(probabilities: Tensor, tokens: Tensor) -> None:
    """Apply Pearson's chi-square test, at about five standard deviations."""
    counts = torch.bincount(tokens.cpu(), minlength=len(probabilities)).double()
    possible = probabilities > 0
    assert counts[~possible].sum() == 0
    expected = probabilities[possible].double() / probabilities.sum() * len(tokens)
    statistic = ((counts[possible] - expected).square() / expected).sum()
    freedom = max(1, int(possible.sum()) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def probabilities_by_sorting(logits: Tensor, **parameters) -> Tensor:
    """Return each token's probability: sort all, and apply the filters in order, one by one."""
    p = SamplingParams(**parameters)
    weights = (logits.double() / float(torch.tensor(p.temperature))).softmax(-1).tolist()
    counted = sorted(weights, reverse=True)[: p.top_k or None]
    counted = [weight for weight in counted if weight >= p.min_p * counted[0] * (1 - 1e-6)]
    kept, before = [], 0.0
    for weight in counted:
        if before >= p.top_p * sum(counted) and p.top_p < 1 and kept:
            break
        kept.append(weight)
        before += weight
    return torch.tensor([weight if weight >= kept[-1] else 0.0 for weight in weights])


# The reference


@pytest.mark.parametrize(
    ("parameters", "ties"),
    [(one, i % 3 != 1) for i, one in enumerate([{}, {"temperature": 0.5}, *FILTERS])],
    ids=str,
)
def test_reference_draws_with_the_probabilities_by_sorting(parameters, ties):
    logits = torch.randn(12, generator=torch.Generator().manual_seed(1)) * 1.5
    if ties:
        logits = (logits * 1.5).round() / 1.5
    p, expected = SamplingParams(**parameters), probabilities_by_sorting(logits, **parameters)
    drawn = [
        reference.choose(
            logits, p.temperature, p.top_k, p.top_p, p.min_p, seed=5, position=position
        )
        for position in range(400 if expected.count_nonzero() > 1 else 20)
    ]
    assert_drawn_from(expected, torch.tensor(drawn))


def test_reference_equals_the_plain_sampler():
    """Both CPU samplers choose the reference's tokens, at thousands of seeds and positions."""
    for vocab in (60, 1500):
        parameters = [{}, {"temperature": 0.5}, *FILTERS] * (60 if vocab < 100 else 6)
        case = step(random_logits(len(parameters), vocab, torch.float32, CPU), parameters)
        case.positions[::3] = 2**31 - 1 - case.positions[::3]
        state = SamplingState(len(case.floats), CPU)
        state.floats, state.ints = case.floats, case.ints
        expected = [
            reference.choose(
                logits,
                *case.floats[row, :1].tolist(),
                int(case.ints[row, 0]),
                *case.floats[row, 1:3].tolist(),
                seed=int(case.ints[row, 1]),
                position=position,
            )
            for logits, row, position in zip(
                case.logits, case.rows.tolist(), case.positions.tolist(), strict=True
            )
        ]
        rows, positions = case.rows.numpy(), case.positions.numpy()
        assert choose(case.logits, state, rows, positions).tolist() == expected
        assert sample(case.logits, state, case.token_ids, rows, positions).tolist() == expected


# Triton: compiled if there is a GPU, else interpreted


@pytest.mark.on_cpu(
    "torch.float32-1",
    "torch.float32-257",
    "torch.float32-1000",
    "torch.float32-4096",
    "torch.float32-9000",
    "torch.float16-7",
    "torch.bfloat16-255",
)
@pytest.mark.parametrize("vocab", [1, 7, 255, 257, 1000, 4096, 9000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_vocabularies_of_any_size(sampling, device, dtype, vocab):
    parameters = [{"temperature": t} for t in (1.0, 0.3, 2.5, 0.0, 1e-9, 100.0)]
    check(sampling, step(random_logits(len(parameters), vocab, dtype, device), parameters))


def test_many_seeds_and_positions(sampling, device):
    case = step(random_logits(200, 300, torch.float32, device), [{}] * 200)
    assert len(set(check(sampling, case).tolist())) > 100


@pytest.mark.on_cpu("64")
@pytest.mark.parametrize("width", [64, 512])
def test_tokens_do_not_depend_on_the_size_of_blocks(sampling, device, width, monkeypatch):
    parameters = [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.01}]
    case = step(random_logits(4, 1000, torch.bfloat16, device), parameters)
    monkeypatch.setattr("toolkit.kernels.triton.sampling.sampling.WIDTH", width)
    check(sampling, case)


@pytest.mark.on_cpu("torch.float32-7", "torch.float16-7", "torch.bfloat16-4500")
@pytest.mark.parametrize(
    ("dtype", "vocab"), [*((dtype, 7) for dtype in DTYPES), (torch.bfloat16, 4500)], ids=str
)
def test_rows_with_and_without_filters(sampling, device, dtype, vocab):
    parameters = [
        *FILTERS,
        {},
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 3, "top_p": 0.5},
    ]
    check(sampling, step(random_logits(len(parameters), vocab, dtype, device), parameters))


@pytest.mark.on_cpu(
    "{'top_k': 5}",
    "{'top_p': 0.95}",
    "{'top_k': 8, 'min_p': 0.3}",
    "{'temperature': 1e-09, 'top_k': 3}",
)
@pytest.mark.parametrize("parameters", FILTERS, ids=str)
def test_filters_with_many_equal_logits(sampling, device, parameters):
    logits = random_logits(3, 700, torch.bfloat16, device, scale=2.0).round()
    check(sampling, step(logits, [parameters] * len(logits)))


@pytest.mark.on_cpu("parameters0", "parameters1")
@pytest.mark.parametrize(
    "parameters", [{"top_p": 0.9}, {"top_k": 50}, {"top_k": 2000, "top_p": 0.9}, {"min_p": 0.9}]
)
def test_filters_with_nearly_equal_and_equal_logits(sampling, device, parameters):
    """Such logits are the filters' hardest case."""
    near = random_logits(3, 3000, torch.float32, device, scale=0.01)
    same = torch.full((2, 3000), -1.5, device=device)
    check(sampling, step(torch.cat((near, same)), [parameters] * 5))


def test_greedy_takes_the_first_of_equal_logits(sampling, device):
    logits = torch.full((4, 6000), -3.0, device=device)
    logits[0, [5999, 4096, 130]] = 2.0
    logits[1, [1, 0]] = 2.0
    logits[2, [300, 299]] = torch.tensor([0.0, -0.0], device=device)
    tokens = check(sampling, step(logits, [{"temperature": 0.0}] * 4))
    assert tokens.tolist() == [130, 0, 299, 0]


@pytest.mark.on_cpu("{'top_p': 0.99}")
@pytest.mark.parametrize(
    "parameters", [{}, {"top_k": 20}, {"top_p": 0.99}, {"min_p": 0.001}], ids=str
)
def test_tokens_with_minus_infinity_are_never_drawn(sampling, device, parameters):
    logits = torch.full((6, 900), -INF, device=device)
    logits[:, [3, 127, 500, 899]] = 1.0
    tokens = check(sampling, step(logits, [parameters] * 6))
    assert set(tokens.tolist()) <= {3, 127, 500, 899}
    assert len(set(tokens.tolist())) > 1


@pytest.mark.on_cpu(
    "torch.float32-{}",
    "torch.float16-{'temperature': 0.0}",
    "torch.bfloat16-{'top_k': 4, 'top_p': 0.5}",
)
@pytest.mark.parametrize(
    "parameters", [{}, {"temperature": 0.0}, {"top_k": 4, "top_p": 0.5}], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_that_are_not_finite_yield_no_token(sampling, device, dtype, parameters):
    logits = random_logits(7, 5000, dtype, device)
    logits[0, 4999] = NAN
    logits[1, 0] = INF
    logits[2] = -INF
    logits[3, 256:384] = NAN
    logits[4, :4990] = -INF
    logits[5] = NAN
    case = step(logits, [parameters] * 7)
    tokens = case.run(sampling).tolist()
    assert [t == -1 for t in tokens] == [True, True, True, True, False, True, False]
    stored = case.token_ids[case.rows.long(), case.positions.long()].tolist()
    assert stored == [max(t, 0) for t in tokens]


def test_entries_without_a_position_are_skipped(sampling, device):
    case = step(
        random_logits(5, 300, torch.float32, device),
        [{}, {"top_k": 2}, {}, {}, {"temperature": 0.0}],
    )
    case.positions[[0, 1, 4]] = -1
    case.rows[[0, 1]] = 10**6  # padding has no valid row
    case.logits[0] = NAN
    tokens = check(sampling, case)
    assert [token == -2 for token in tokens.tolist()] == [True, True, False, False, True]
    assert (case.token_ids[:, -1] == -7).all()


def test_empty_steps(sampling, device):
    case = step(torch.empty(0, 10, device=device), [])
    assert case.run(sampling).shape == (0,)


def test_rows_are_independent(sampling, device):
    parameters = [{}, {"top_k": 20, "top_p": 0.95}, {"top_p": 0.8}, {"min_p": 0.1}]
    together = step(random_logits(4, 4500, torch.bfloat16, device), parameters)
    tokens = together.run(sampling).tolist()
    for i in (3, 1, 0, 2):
        fields = (together.logits, together.rows, together.positions)
        alone = Step(
            *(x[i : i + 1] for x in fields), together.floats, together.ints, together.token_ids
        )
        assert alone.run(sampling).tolist() == [tokens[i]]


@pytest.mark.on_cpu("1003-1005")
@pytest.mark.parametrize(
    ("vocab", "width"), [(1003, 1008), (1003, 1005), (1008, 1024), (5000, 5008)]
)
def test_padding_of_rows_is_not_read(sampling, device, vocab, width):
    buffer = torch.full((6, width), NAN, dtype=torch.bfloat16, device=device)
    logits = buffer[:, :vocab]
    logits.copy_(random_logits(6, vocab, torch.bfloat16, device))
    check(sampling, step(logits, [{}, {"top_k": 20, "top_p": 0.95}] * 3))
    assert buffer[:, vocab:].isnan().all()


def test_many_entries_may_share_a_row_of_logits(sampling, device):
    logits = random_logits(1, 40, torch.float32, device).expand(30, 40)
    tokens = check(sampling, step(logits, [{}] * 30))
    assert len(set(tokens.tolist())) > 3


def test_strided_vocabularies_are_errors(sampling):
    case = step(torch.zeros(8, 4).T, [{}] * 4)
    with pytest.raises(ValueError, match="contiguous"):
        case.run(sampling)


# Log-probabilities


@pytest.mark.on_cpu(
    "torch.float32-1-1-0",
    "torch.float32-2-5000-0",
    "torch.float16-3-7-1",
    "torch.bfloat16-5-1003-20",
)
@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.parametrize(("n", "vocab"), [(1, 1), (3, 7), (2, 5000), (5, 1003)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logprobs_equal_reference(sampling, device, dtype, n, vocab, k):
    logits = random_logits(n, vocab, dtype, device)
    logits[0, : vocab // 2] = -INF
    wanted = torch.randint(0, vocab, (n,), device=device)
    wanted[-1] = -1
    _, expected, expected_rank = unpacked(reference.logprobs(logits, wanted, min(k, vocab)))
    for compute in (sampling.logprobs, gather_logprobs):
        tokens, values, rank = unpacked(compute(logits, wanted, k))
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-5)
        assert rank.tolist() == expected_rank.tolist()
        assert tokens[:, 0].tolist() == wanted.clamp(min=0).tolist()
        assert tokens.shape == (n, 1 + min(k, vocab))
        assert torch.equal(
            logits.float().gather(1, tokens[:, 1:].long()),
            logits.float().topk(min(k, vocab)).values,
        )


def unpacked(records: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (tokens, log-probabilities, ranks)."""
    return (
        records[:, 1::2],
        records[:, 2::2].contiguous().view(torch.float32),
        records[:, 0],
    )


@pytest.mark.on_cpu("5")
@pytest.mark.parametrize("k", [5, 100])
def test_a_top_tokens_logprobs_are_bitwise_equal(sampling, device, k):
    logits = random_logits(9, 3000, torch.bfloat16, device)
    logits[0] = 0.0
    best = logits.argmax(-1).int()
    for compute in (sampling.logprobs, gather_logprobs):
        tokens, values, rank = unpacked(compute(logits, best, k))
        assert torch.equal(values[:, 0], values[:, 1])
        assert rank.tolist() == [1] * 9
        assert all(len(set(row)) == k for row in tokens[:, 1:].tolist())


def test_equally_likely_tokens_are_in_order(sampling, device):
    logits = torch.zeros(1, 600, device=device)
    logits[0, 300:] = 1.0
    tokens, _, rank = unpacked(sampling.logprobs(logits, torch.tensor([3], device=device), 302))
    assert tokens.tolist() == [[3, *range(300, 600), 0, 1]]
    assert rank.tolist() == [301]


def test_logprobs_do_not_read_the_padding_of_rows(sampling, device):
    buffer = torch.full((3, 1008), NAN, device=device)
    logits = buffer[:, :1003]
    logits.copy_(random_logits(3, 1003, torch.float32, device))
    wanted = torch.tensor([1, 2, 1002], device=device)
    padded = sampling.logprobs(logits, wanted, 8)
    # Narrower loads may add the weights in another order.
    expected = sampling.logprobs(logits.contiguous(), wanted, 8)
    assert torch.equal(padded[:, :2], expected[:, :2])
    assert torch.equal(padded[:, 1::2], expected[:, 1::2])
    values, expected_values = (
        x[:, 2::2].contiguous().view(torch.float32) for x in (padded, expected)
    )
    torch.testing.assert_close(values, expected_values)


def test_logprobs_of_no_rows(sampling, device):
    empty = torch.empty(0, 30, device=device)
    no_tokens = torch.empty(0, dtype=torch.int32, device=device)
    for compute in (sampling.logprobs, gather_logprobs):
        assert compute(empty, no_tokens, 3).shape == (0, 9)


# Penalties

PENALTIES = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4},
    {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.3},
    {},
]


@dataclass
class Histories:
    """Histories to penalize. Entry i is row `rows[i]` of the state, with `lengths[i]` tokens."""

    logits: Tensor
    rows: Tensor
    lengths: Tensor
    floats: Tensor
    ints: Tensor
    windows: Tensor
    token_ids: Tensor

    def penalized(self, module) -> Tensor:
        logits = self.logits.clone()
        tables = self.floats, self.ints, self.windows
        module.penalize(logits, self.rows, self.lengths, *tables, self.token_ids)
        return logits


def histories(
    logits: Tensor, lengths: list[int], num_prompt_tokens: int, num_tokens: int
) -> Histories:
    """Return random tokens below `num_tokens` for every row of logits. Row r has PENALTIES[r]."""
    n, device = len(logits), logits.device
    params = [SamplingParams(**PENALTIES[row % len(PENALTIES)]) for row in range(n)]
    penalties = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    return Histories(
        logits,
        torch.arange(n - 1, -1, -1, dtype=torch.int32, device=device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        torch.tensor([(NAN, NAN, NAN, *penalty) for penalty in penalties], device=device),
        torch.tensor([[-1, -1, num_prompt_tokens]] * n, device=device),
        torch.full((n,), 2**31 - 1, dtype=torch.int32, device=device),
        torch.randint(0, num_tokens, (n, max(lengths) + 1), dtype=torch.int32, device=device),
    )


def test_reference_penalizes_by_the_formulas():
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0, 1.0]])
    case = histories(logits, [5], num_prompt_tokens=2, num_tokens=1)
    case.floats[0, 3:] = torch.tensor([2.0, 0.5, 0.1])
    case.token_ids[0] = torch.tensor([0, 1, 2, 3, 3, 4])  # the last one is past the length
    expected = [1.0, -4.0, 1.0 - 0.5 - 0.1, -4.0 - 0.5 - 0.2, 1.0, 1.0]
    torch.testing.assert_close(case.penalized(reference), torch.tensor([expected]))


@pytest.mark.on_cpu("9")
@pytest.mark.parametrize("vocab", [9, 3000])
def test_penalties_equal_reference(sampling, device, vocab):
    logits = random_logits(5, vocab, torch.float32, device)
    case = histories(logits, [1500, 1400, 701, 1030, 700], num_prompt_tokens=700, num_tokens=vocab)
    case.token_ids[2, 500:] = case.token_ids[2, 0]
    expected = case.penalized(reference)
    torch.testing.assert_close(case.penalized(sampling), expected)
    assert torch.equal(expected[0], logits[0])  # its row has no penalties
    case.windows[:] = 650
    shorter = case.penalized(reference)
    torch.testing.assert_close(case.penalized(sampling), shorter)
    assert vocab == 9 or not torch.equal(shorter, expected)
    case.windows[:] = 2**31 - 1
    case.logits = torch.full((5, vocab + 3), NAN, device=device)[:, :vocab].copy_(logits)
    torch.testing.assert_close(case.penalized(sampling), expected)


def test_penalties_skip_unknown_tokens_and_empty_rows(sampling, device):
    case = histories(torch.zeros(2, 9, device=device), [3, -1], num_prompt_tokens=0, num_tokens=9)
    case.floats[:, 3:] = torch.tensor([1.0, 1.0, 0.0])
    case.token_ids[1] = torch.tensor([-1, 5, 50, 2])
    assert case.penalized(sampling).nonzero().tolist() == [[0, 5]]


def test_counts_of_penalties_are_zero_again(sampling, device):
    """Neutral penalties count nothing."""
    logits = random_logits(5, 300, torch.float32, device)
    case = histories(logits, [1500, 1400, -1, 1030, 700], num_prompt_tokens=70, num_tokens=300)
    counts = torch.zeros(8, 300, dtype=torch.int32, device=device)
    changed = logits.clone()
    tables = case.floats, case.ints, case.windows, case.token_ids
    for _ in range(2):
        changed.copy_(logits)
        sampling.penalize(changed, case.rows, case.lengths, *tables, counts)
        assert not counts.any()
    assert torch.equal(changed, case.penalized(sampling))


@pytest.mark.on_cpu("torch.bfloat16")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_logits_are_gathered_and_their_tokens_scattered(triton, device, dtype):
    from toolkit.kernels.triton.sampling import resample

    logits = torch.full((7, 9010), NAN, dtype=dtype, device=device)[:, :9001]
    logits.copy_(random_logits(7, 9001, dtype, device))
    rows, positions = torch.arange(14, dtype=torch.int32, device=device).view(2, 7)
    index = torch.tensor([5, 0, -1, 6], dtype=torch.int32, device=device)
    out = torch.full((4, 9001), 5.0, device=device)
    places = torch.full((2, 4), 77, dtype=torch.int32, device=device)
    resample.gather_logits(logits, index, rows, positions, (out, *places))
    assert torch.equal(out[[0, 1, 3]], logits[[5, 0, 6]].float())
    assert (out[2] == 5.0).all()
    assert places.tolist() == [[5, 0, 0, 6], [12, 7, -1, 13]]
    target = torch.arange(7, dtype=torch.int32, device=device)
    resample.scatter(
        torch.tensor([50, 51, 52, 53], dtype=torch.int32, device=device), index, target
    )
    assert target.tolist() == [51, 1, 2, 3, 4, 50, 53]


def test_penalties_of_16_bit_logits_are_errors(sampling):
    empty = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="fp32"):
        sampling.penalize(torch.zeros(1, 4, dtype=torch.float16), *[empty] * 6)


# Real sizes, compiled

REAL = [{}, {"temperature": 0.0}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}, *FILTERS]


@gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "vocab"), [(64, 151_936), (37, 50_257), (5, 256_000)])
@pytest.mark.parametrize("scale", [0.1, 2.0, 5.0])
def test_real_sizes(sampling, device, scale, n, vocab, dtype):
    """All but a few tokens equal the reference's: some races are decided by rounding."""
    logits = random_logits(n, vocab, dtype, device, scale)
    case = step(logits, [REAL[i % len(REAL)] for i in range(n)])
    expected, actual = case.run(reference), case.run(sampling)
    assert (expected != actual).sum() <= n // 30
    greedy = case.floats[case.rows.long(), 0] == 0
    assert torch.equal(actual[greedy], logits[greedy].float().argmax(-1).int())


@gpu
@needs_gpu
@pytest.mark.parametrize("parameters", [{}, *FILTERS], ids=str)
def test_tokens_are_drawn_with_their_probabilities(sampling, device, parameters):
    logits = random_logits(1, 300, torch.float32, device, scale=1.0)
    n = 50_000
    p = SamplingParams(**parameters)
    floats = torch.tensor([[p.temperature, p.top_p, p.min_p, 1.0, 0.0, 0.0]], device=device)
    ints = torch.tensor([[p.top_k, 17, 0]], device=device)
    rows = torch.zeros(n, dtype=torch.int32, device=device)
    positions = torch.arange(n, dtype=torch.int32, device=device)
    token_ids = torch.empty(1, n, dtype=torch.int32, device=device)
    out = torch.empty_like(rows)
    sampling.sample(logits.expand(n, 300), rows, positions, floats, ints, token_ids, out)
    assert torch.equal(out, token_ids[0])
    probabilities = probabilities_by_sorting(logits[0].cpu(), **parameters)
    likely = probabilities * n >= 5  # the others are one category
    merged = torch.cat((probabilities[likely], probabilities[~likely].sum()[None]))
    category = torch.where(likely, likely.cumsum(0) - 1, int(likely.sum()))
    assert_drawn_from(merged, category[out.cpu().long()])


@gpu
@needs_gpu
def test_captured_graphs_follow_their_inputs_without_waiting(sampling, device):
    case = step(random_logits(16, 50_257, torch.float16, device), [{}, *FILTERS])
    out = torch.empty_like(case.rows)

    def run() -> None:
        sampling.sample(
            case.logits, case.rows, case.positions, case.floats, case.ints, case.token_ids, out
        )

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for parameters in (
        [{"temperature": 0.0}] * 16,
        [*FILTERS, {}],
        [{"top_k": 20, "top_p": 0.9}] * 16,
    ):
        other = step(
            random_logits(16, 50_257, torch.float16, device, scale=4.0), parameters, seed=1
        )
        for name in ("logits", "rows", "positions", "floats", "ints"):
            getattr(case, name).copy_(getattr(other, name))
        graph.replay()
        assert out.tolist() == other.run(reference).tolist()


@gpu
@needs_gpu
def test_penalties_of_real_sizes(sampling, device):
    logits = random_logits(64, 50_257, torch.float32, device)
    lengths = torch.randint(1, 8000, (64,)).tolist()
    case = histories(logits, lengths, num_prompt_tokens=3000, num_tokens=2000)
    case.windows[1:] = torch.arange(100, 6400, 100)
    host = Histories(*(x.cpu() for x in vars(case).values()))
    torch.testing.assert_close(case.penalized(sampling).cpu(), host.penalized(reference))


@pytest.mark.usefixtures("sampling")
def test_kernels_equal_the_plain_sampler(device):
    """Biases, penalties, grammars and the choice are applied in the same order."""
    given = [
        {"logit_bias": {5: 40.0}, "repetition_penalty": 1.9},
        {"allowed_token_ids": [1, 2, 3], "presence_penalty": 2.0, "temperature": 0.0},
        {"logit_bias": {7: 30.0}, "frequency_penalty": 1.5, "top_k": 4},
        {"bad_words_token_ids": [[4, 4], [9]], "temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 0.0},
    ]
    params, vocab, length = [SamplingParams(**one) for one in given], 64, 20
    state = SamplingState(len(params), device)
    for row, one in enumerate(params):
        state.set(row, spec_of(one, 8, [0]), 100 + row)
    load_rows(state)
    torch.manual_seed(0)
    logits = 3 * torch.randn(len(params), vocab, device=device)
    tokens = torch.randint(0, 9, (len(params), length + 1), dtype=torch.int32, device=device)
    masks = np.random.default_rng(0).integers(-(2**31), 2**31, (3, vocab // 32)).astype(np.int32)
    rows = np.arange(len(params), dtype=np.int32)
    masked = np.array([0, 2, 5]), masks
    found, changed = [], []
    for kernels in (Kernels(), TritonKernels()):
        changed.append(logits.clone())
        lengths = np.full(len(params), length, np.int32)
        found.append(
            sampler.sample(changed[-1], state, tokens.clone(), rows, lengths, kernels, masked)
        )
    assert found[0].tolist() == found[1].tolist()
    torch.testing.assert_close(changed[0], changed[1])
    assert (changed[0].isinf().sum(1) > 0).tolist() == [True, True, True, True, False, True]
