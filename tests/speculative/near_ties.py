"""Compare answers of two engines on a GPU, whose sums differ by rounding.

How many tokens a step computes together decides in which order a GPU adds. A token that was chosen
by less than the rounding may then be another one, and so is all that follows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest
import torch

from toolkit import SamplingParams
from toolkit.engine.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from toolkit.kernels.reference import exponentials
from toolkit.sampling.params import answer_seed

NEAR = 1e-3
"""Greatest difference between equal log-probabilities. In fp32 it is about 1e-5."""


class Model(Protocol):
    """A reference of the model that both engines have."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return `[tokens, vocab]`."""


def scores(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int], seed: int
) -> torch.Tensor:
    """Return a number for each token, of which the sampler chooses the greatest.

    logits: [vocab], after the prompt and the output. Biases and penalties change them, and Gumbel
    noise times the temperature, so that a difference of two has the unit of log-probabilities.
    Tokens that the request forbids, or that top-k, top-p and min-p exclude, have numbers too."""
    changed = logits.double()
    for token, bias in (params.logit_bias or {}).items():
        changed[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        changed[token] *= 1 / factor if changed[token] > 0 else factor
    for token in set(output):
        changed[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    position = torch.tensor([len(prompt) + len(output)])
    noise = -exponentials(torch.tensor([seed]), position, len(logits))[0].log()
    return changed + params.temperature * noise


def require_equal_or_near_tie(
    model: Model,
    prompt: list[int],
    params: SamplingParams,
    one: CompletionOutput,
    other: CompletionOutput,
) -> bool:
    """Check that two answers are equal up to a near-tie. Return False if there is one.

    At the first tokens that differ, the two differ by at most `NEAR` in the `scores` that follow
    from the model's logits. Log-probabilities before them are equal up to `NEAR`."""
    tokens, others = list(one.token_ids), list(other.token_ids)
    pairs = enumerate(zip(tokens, others, strict=False))
    end = next((at for at, (a, b) in pairs if a != b), min(len(tokens), len(others)))
    require_near_logprobs(list(one.logprobs or ())[:end], list(other.logprobs or ())[:end])
    if end == len(tokens) == len(others):
        facts = [(x.text, x.finish_reason, x.stop_reason) for x in (one, other)]
        assert facts[0] == facts[1], f"the same tokens, and {facts}"
        assert one.cumulative_logprob == pytest.approx(
            other.cumulative_logprob, abs=NEAR * max(1, end)
        )
        return True
    assert end < min(len(tokens), len(others)), "one answer is the beginning of the other"
    logits = model.logits(prompt + tokens[:end])[-1]
    both = scores(logits, params, prompt, tokens[:end], answer_seed(params.seed, one.index))
    gap = float(both[tokens[end]] - both[others[end]])
    assert abs(gap) <= NEAR, (
        f"token {end} is {tokens[end]} or {others[end]}, which is no near-tie: they differ by {gap}"
    )
    return False


def require_near_logprobs(
    positions: Sequence[PositionLogprobs | None], others: Sequence[PositionLogprobs | None]
) -> None:
    """Check that log-probabilities at positions are equal up to `NEAR`, best first.

    The first of a position is the chosen token, and the same in both. Of the others only the values
    are compared: two that are almost equal may change places."""
    assert len(positions) == len(others)
    for one, other in zip(positions, others, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert next(iter(one)) == next(iter(other)), "log-probabilities of different tokens"
        values = [[x.logprob for x in at.values()] for at in (one, other)]
        ranked = [[v[0], *sorted(v, reverse=True)[: min(map(len, values))]] for v in values]
        assert ranked[0] == pytest.approx(ranked[1], abs=NEAR), f"log-probabilities {ranked}"


def require_equal_or_near_ties(
    model: Model,
    params: list[SamplingParams],
    expected: list[RequestOutput],
    found: list[RequestOutput],
) -> int:
    """Compare the answers to requests. Return how many end in near-ties."""
    num_ties = 0
    for param, one, other in zip(params, expected, found, strict=True):
        require_near_logprobs(list(one.prompt_logprobs or ()), list(other.prompt_logprobs or ()))
        for a, b in zip(one.outputs, other.outputs, strict=True):
            prompt = list(one.prompt_token_ids)
            num_ties += not require_equal_or_near_tie(model, prompt, param, a, b)
    return num_ties
