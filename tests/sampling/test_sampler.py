"""The sampler, compared with Transformers' processors and with brute force, on random logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.checkpoints import spec_of
from tests.sampled import choose, load_rows, sample
from toolkit.kernels.reference import exponentials
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.sampling_state import SamplingState

VOCAB = 60
EOS = 7


def make_state(*params: SamplingParams, num_prompt_tokens: int = 0) -> SamplingState:
    """Return a state whose row i has the i-th parameters, and seed i by default."""
    state = SamplingState(len(params), torch.device("cpu"))
    for row, one in enumerate(params):
        state.set(row, spec_of(one, num_prompt_tokens, [EOS]), one.seed or row)
    load_rows(state)
    return state


def random_logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2.5


def draw_many(
    logits: torch.Tensor, params: SamplingParams, count: int, first: int = 0
) -> torch.Tensor:
    """Count the tokens drawn at `count` positions that all have the logits [1, VOCAB]."""
    state = make_state(params)
    tokens = sample(
        logits.repeat(count, 1),
        state,
        torch.zeros(1, 1, dtype=torch.int32),
        np.zeros(count, np.int32),
        np.arange(first, first + count, dtype=np.int32),
    )
    return tokens.bincount(minlength=VOCAB)


def chi_square_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Pearson's test at about four standard deviations.

    Tokens expected less than 10 times are counted together.
    """
    expected = probabilities * counts.sum()
    common = expected >= 10
    pairs = list(zip(counts[common].tolist(), expected[common].tolist(), strict=True))
    rest = (float(counts[~common].sum()), float(expected[~common].sum()))
    if rest[1] >= 5:
        pairs.append(rest)
    statistic = sum((c - e) ** 2 / e for c, e in pairs)
    freedom = len(pairs) - 1
    return freedom < 1 or statistic < freedom + 4 * math.sqrt(2 * freedom) + 4


CASES = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.3},
    "top-k": {"top_k": 5},
    "top-k of everything": {"top_k": VOCAB + 10},
    "top-p": {"top_p": 0.7},
    "narrow top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.1},
    "top-k and top-p": {"top_k": 12, "top_p": 0.8, "temperature": 1.7},
    "all three": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 2.0},
}


def warped(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return Transformers' probabilities, in our order: min-p, top-k, then top-p of the rest."""

    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    scores = TemperatureLogitsWarper(params.temperature)(None, logits)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    return scores.softmax(-1)[0]


@pytest.mark.parametrize("case", CASES)
def test_frequencies_of_tokens_match_transformers(case):
    params = SamplingParams(seed=1000, **{"temperature": 1.0} | CASES[case])
    logits = random_logits(0)
    expected = warped(logits, params)
    counts = draw_many(logits, params, 30_000)
    assert counts[expected == 0].sum() == 0, "a filtered token was drawn"
    assert (counts[expected > 1e-3] > 0).all(), "a kept token was never drawn"
    assert chi_square_fits(counts, expected)


def test_the_fit_detects_a_small_bias():
    logits = random_logits(0)
    counts = draw_many(logits, SamplingParams(seed=5), 30_000)
    assert chi_square_fits(counts, logits.softmax(-1)[0])
    assert not chi_square_fits(counts, (logits * 1.05).softmax(-1)[0])


@pytest.mark.parametrize("first", [0, -10_000, 2**63 - 20_000, -(2**63)])
def test_frequencies_over_seeds_match_the_probabilities(first):
    """At one position, consecutive seeds are independent draws."""
    logits = random_logits(3)
    count = 20_000
    state = state_of_seeds(torch.arange(count) + first)
    rows = np.arange(count, dtype=np.int32)
    tokens = sample(
        logits.repeat(count, 1),
        state,
        torch.zeros(count, 1, dtype=torch.int32),
        rows,
        np.full_like(rows, 17),
    )
    expected = logits.softmax(-1)[0]
    assert chi_square_fits(tokens.bincount(minlength=VOCAB), expected)
    pairs = (tokens[:-1] * VOCAB + tokens[1:]).bincount(minlength=VOCAB**2)
    assert chi_square_fits(pairs, expected.outer(expected).flatten())


def test_frequencies_at_the_last_positions_match_the_probabilities():
    logits = random_logits(4)
    counts = draw_many(logits, SamplingParams(seed=-1), 20_000, 2**31 - 20_000)
    assert chi_square_fits(counts, logits.softmax(-1)[0])


def state_of_seeds(seeds: torch.Tensor) -> SamplingState:
    """Return a state whose row i has the i-th seed, at temperature 1."""
    state = SamplingState(len(seeds), torch.device("cpu"))
    state.floats[:, 0] = state.floats[:, 1] = 1.0
    state.ints[:, 1] = seeds
    return state


def test_rare_tokens_of_a_large_vocabulary_are_drawn():
    """The vocabulary is 131,072 equal tokens and one of probability 0.9."""
    count, vocab = 1500, 131_073
    logits = torch.zeros(vocab)
    logits[0] = math.log(9 * (vocab - 1))
    tokens = torch.cat(
        [
            sample(
                logits.repeat(100, 1),
                make_state(SamplingParams(seed=3)),
                torch.zeros(1, 1, dtype=torch.int32),
                np.zeros(100, np.int32),
                np.arange(start, start + 100, dtype=np.int32),
            )
            for start in range(0, count, 100)
        ]
    )
    rare = tokens[tokens > 0]
    assert abs(len(rare) - count / 10) < 4 * math.sqrt(count * 0.09)
    assert chi_square_fits((rare * 8 // vocab).bincount(minlength=8), torch.full((8,), 1 / 8))


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.95}], ids=str)
def test_similar_logits_choose_the_same_token(filters):
    """A drafter that shares the seed agrees with its target at most positions."""
    count, vocab = 2000, 300
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(count, vocab, generator=generator) * 2.0
    drafter = target + torch.randn(count, vocab, generator=generator) * 0.25
    rows, positions = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    chosen = [
        choose(logits, make_state(SamplingParams(seed=seed, **filters)), rows, positions)
        for logits, seed in ((target, 5), (drafter, 5), (drafter, 6))
    ]
    same, independent = ((chosen[0] == other).float().mean() for other in chosen[1:])
    assert same > 0.75
    assert independent < 0.3


def test_a_temperature_of_zero_or_close_to_it_is_greedy():
    logits = random_logits(1, 4)
    for temperature in (0.0, 1e-45, 1e-38, 1e-12, 1e-6):
        state = make_state(*[SamplingParams(temperature=temperature)] * 4)
        rows = np.arange(4, dtype=np.int32)
        tokens = sample(logits.clone(), state, torch.zeros(4, 1, dtype=torch.int32), rows, rows)
        assert tokens.tolist() == logits.argmax(-1).tolist(), temperature


def test_samples_do_not_depend_on_other_requests():
    """Greedy, filtering and plain requests share a step. Ties show any dependence on order."""
    kinds = [SamplingParams(temperature=0.0), *[SamplingParams(**c) for c in CASES.values()]]
    rounded = random_logits(2, len(kinds)).round()
    tokens_of = torch.zeros(len(kinds), 1, dtype=torch.int32)
    state = make_state(*kinds)
    for position in range(60):
        rows = np.arange(len(kinds), dtype=np.int32)
        together = sample(rounded.clone(), state, tokens_of, rows, np.full_like(rows, position))
        backwards = sample(
            rounded.flip(0), state, tokens_of, rows[::-1].copy(), np.full_like(rows, position)
        )
        assert backwards.flip(0).equal(together)
        for row in range(len(kinds)):
            alone = sample(
                rounded[row : row + 1].clone(),
                state,
                tokens_of,
                rows[row : row + 1],
                np.array([position], np.int32),
            )
            assert alone.item() == together[row].item(), (kinds[row], position)


def random_history(rng: np.random.Generator, length: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(0, VOCAB, (1, length))).to(torch.int32)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 5.0])
def test_repetition_penalty_matches_transformers(penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    history = random_history(np.random.default_rng(0), 25)
    logits = random_logits(4)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history.long(), logits.clone())
    state = make_state(
        SamplingParams(temperature=0.0, repetition_penalty=penalty), num_prompt_tokens=10
    )
    actual = logits.clone()
    token = sample(actual, state, history, np.array([0], np.int32), np.array([25], np.int32))
    torch.testing.assert_close(actual, expected)
    assert token.item() == expected.argmax().item()
    assert not torch.equal(actual, logits)


@pytest.mark.parametrize(
    ("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 2.0), (0.3, -0.4)]
)
def test_presence_and_frequency_penalties_ignore_the_prompt(presence, frequency):
    history = random_history(np.random.default_rng(1), 30)
    prompt, length = 12, 26  # tokens after `length` belong to an earlier request
    logits = random_logits(5)
    expected = logits.clone()
    for token in range(VOCAB):
        count = history[0, prompt:length].tolist().count(token)
        expected[0, token] -= frequency * count + (presence if count else 0.0)
    params = SamplingParams(temperature=0.0, presence_penalty=presence, frequency_penalty=frequency)
    actual = logits.clone()
    sample(
        actual,
        make_state(params, num_prompt_tokens=prompt),
        history,
        np.array([0], np.int32),
        np.array([length], np.int32),
    )
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("window", [1, 3, 8, 26, 40])
def test_penalties_count_the_last_tokens_of_their_window(window: int):
    """Compare with a history that lacks the earlier tokens."""
    history = random_history(np.random.default_rng(3), 30)
    prompt, length = 12, 26
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    found, expected = random_logits(5), random_logits(5)
    for logits, tokens, shift, more in (
        (found, history, 0, {"penalty_window": window}),
        (expected, history[:, max(0, length - window) :], max(0, length - window), {}),
    ):
        params = SamplingParams(temperature=0.0, **penalties, **more)
        state = make_state(params, num_prompt_tokens=max(0, prompt - shift))
        sample(logits, state, tokens, np.array([0], np.int32), np.array([length - shift], np.int32))
    torch.testing.assert_close(found, expected)
    assert not torch.equal(found, random_logits(5))


def test_penalties_change_only_requests_that_have_them():
    history = random_history(np.random.default_rng(2), 9).repeat(3, 1)
    logits = random_logits(6, 3)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, repetition_penalty=2.0),
    ]
    actual = logits.clone()
    sample(
        actual,
        make_state(*params, params[0]),
        history,
        np.arange(3, dtype=np.int32),
        np.full(3, 9, np.int32),
    )
    assert torch.equal(actual[[0, 2]], logits[[0, 2]])
    assert not torch.equal(actual[1], logits[1])


@pytest.mark.parametrize("bias", [{3: 100.0, 9: -100.0}, {3: 2, 4: -1}])
def test_logit_bias_is_added(bias):
    """A bias may be an int."""
    logits = random_logits(7)
    expected = logits.clone()
    for token, value in bias.items():
        expected[0, token] += value
    actual = logits.clone()
    state = make_state(SamplingParams(temperature=0.0, logit_bias=bias))
    token = sample(
        actual,
        state,
        torch.zeros(1, 1, dtype=torch.int32),
        np.zeros(1, np.int32),
        np.zeros(1, np.int32),
    )
    torch.testing.assert_close(actual, expected)
    assert token.item() == expected.argmax().item()


def test_min_tokens_forbids_eos_and_stop_tokens():
    params = SamplingParams(
        temperature=0.0, min_tokens=4, stop_token_ids=[20, 21], logit_bias={EOS: 50.0, 20: 40.0}
    )
    state = make_state(params, num_prompt_tokens=5)
    for length in range(5, 12):
        token = sample(
            random_logits(length),
            state,
            torch.zeros(1, 20, dtype=torch.int32),
            np.zeros(1, np.int32),
            np.array([length], np.int32),
        ).item()
        if length - 5 < 4:
            assert token not in (EOS, 20, 21)
        else:
            assert token == EOS


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logits_do_not_change_other_requests(bad, temperature):
    logits = random_logits(8, 3)
    spoiled = logits.clone()
    spoiled[1, 30] = bad
    state = make_state(
        *[SamplingParams(temperature=temperature, top_p=0.9, repetition_penalty=1.1)] * 3
    )
    history = random_history(np.random.default_rng(3), 4).repeat(3, 1)
    rows, lengths = np.arange(3, dtype=np.int32), np.full(3, 4, np.int32)
    good = sample(logits, state, history, rows, lengths).tolist()
    assert sample(spoiled, state, history, rows, lengths).tolist() == [good[0], -1, good[2]]


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}], ids=str)
@pytest.mark.parametrize("temperature", [1e-30, 1e-3, 1.0, 100.0])
def test_a_token_with_probability_zero_is_never_drawn(temperature, filters):
    count = 300
    logits = torch.full((count, VOCAB), -math.inf)
    logits[:, 41] = -1e30  # the only finite one of even rows
    logits[1::2, 5] = -1e30
    state = make_state(SamplingParams(temperature=temperature, seed=1, **filters))
    rows, positions = np.zeros(count, np.int32), np.arange(count, dtype=np.int32)
    tokens = torch.zeros(1, 1, dtype=torch.int32)
    for chosen in (
        sample(logits.clone(), state, tokens, rows, positions),
        choose(logits, state, rows, positions),
    ):
        assert set(chosen[::2].tolist()) == {41}
        assert set(chosen[1::2].tolist()) == {5, 41}


def hashed(seed: int, position: int, token: int) -> int:
    """Return the 32 random bits of a token, from the definition."""
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    high, low = divmod(x ^ x >> 31, 2**32)
    x = (token * 0x9E3779B9 + low) % 2**32
    x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
    x = (x ^ x >> 15 ^ high) * 0xD35A2D97 % 2**32
    return x ^ x >> 15


@pytest.mark.parametrize("seed", [0, 1234567, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("position", [0, 77, 2**31 - 1])
def test_exponential_numbers_follow_their_definition(seed, position):
    actual = exponentials(torch.tensor([seed]), torch.tensor([position], dtype=torch.int32), 1000)
    v = [(hashed(seed, position, token) + 0.5) / 2**32 for token in range(1000)]
    assert (-torch.expm1(-actual[0])).tolist() == pytest.approx(v, rel=1e-7)


def test_exponential_numbers_are_independent_and_well_spread():
    seeds = torch.tensor([0, 1, 2, -1, 2**62, -(2**63)])
    by_position = exponentials(seeds.repeat_interleave(500), torch.arange(500).repeat(6), 128)
    assert (by_position > 0).all()
    assert by_position.isfinite().all()
    numbers = (-torch.expm1(-by_position)).view(6, 500, 128)  # uniform in [0, 1)
    tenth = (numbers * 10).long()
    for pairs in (
        tenth[:, :, :-1] * 10 + tenth[:, :, 1:],  # next token
        tenth[:, :-1] * 10 + tenth[:, 1:],  # next position
        tenth[:-1] * 10 + tenth[1:],  # another seed
        tenth[:, 1:, :-1] * 10 + tenth[:, :-1, 1:],
        (numbers * 100).long(),
    ):
        counts = pairs.flatten().bincount(minlength=100)
        assert chi_square_fits(counts, torch.full((100,), 0.01))


def test_small_exponential_numbers_are_precise():
    """The least of many is exponentially distributed, too, and hardly any two are equal."""
    vocab = 1 << 17
    least = torch.cat(
        [
            exponentials(torch.full((50,), 9), torch.arange(start, start + 50), vocab).amin(dim=1)
            for start in (0, 50)
        ]
    )
    assert len(set(least.tolist())) > 0.99 * len(least)
    uniform = -torch.expm1(-least * vocab)
    assert chi_square_fits((uniform * 20).long().bincount(minlength=20), torch.full((20,), 0.05))
