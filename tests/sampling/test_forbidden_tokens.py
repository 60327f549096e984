"""Allowed tokens and bad words, compared with Transformers' processor."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.checkpoints import spec_of
from tests.sampled import load_rows, sample
from toolkit.sampling.params import SamplingParams
from toolkit.sampling.sampler import add_biases
from toolkit.sampling.sampling_state import SamplingState

VOCAB = 12
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]


def biased(
    logits: torch.Tensor,
    params: list[SamplingParams],
    tokens: list[list[int]],
    num_prompt_tokens: int,
    device: str,
) -> torch.Tensor:
    """Return the logits after `add_biases`. Row i has the i-th parameters and tokens."""
    state = SamplingState(len(params), torch.device(device))
    history = torch.zeros(len(params), 64, dtype=torch.int32)
    for row, (one, known) in enumerate(zip(params, tokens, strict=True)):
        state.set(row, spec_of(one, num_prompt_tokens), 0)
        history[row, : len(known)] = torch.tensor(known)
    changed = logits.to(device, copy=True)
    rows = np.arange(len(params), dtype=np.int32)
    lengths = torch.tensor([len(t) for t in tokens], dtype=torch.int32, device=device)
    add_biases(changed, state, history.to(device), rows, lengths)
    return changed.cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_bad_words_match_transformers(device: str) -> None:
    from transformers import NoBadWordsLogitsProcessor

    rng = random.Random(5)
    num_forbidden = 0
    for seed in range(60):
        words = [
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
            for _ in range(rng.randint(1, 5))
        ]
        tokens = [[rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))] for _ in range(4)]
        for output in tokens:  # often a bad word lacks only its last token
            if rng.random() < 0.7:
                output += rng.choice(words)[:-1]
        logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(seed))
        actual = biased(logits, [SamplingParams(bad_words_token_ids=words)] * 4, tokens, 0, device)
        processor = NoBadWordsLogitsProcessor(words, eos_token_id=None)
        for row, output in enumerate(tokens):
            expected = processor(
                torch.tensor([output], dtype=torch.int64), logits[row : row + 1].clone()
            )[0]
            assert torch.equal(actual[row], expected)
            num_forbidden += int(expected.isinf().sum())
    assert num_forbidden > 100


def test_bad_words_do_not_begin_in_the_prompt() -> None:
    params = [SamplingParams(bad_words_token_ids=[[1, 2, 3]])]
    logits = torch.zeros(1, VOCAB)
    assert biased(logits, params, [[1, 2]], 2, "cpu").isfinite().all()
    assert biased(logits, params, [[1, 2]], 1, "cpu").isfinite().all()
    assert not biased(logits, params, [[9, 1, 2]], 1, "cpu").isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_only_allowed_tokens_keep_their_logits(device: str) -> None:
    logits = torch.randn(2, VOCAB)
    params = [
        SamplingParams(allowed_token_ids=[7, 2, 7], logit_bias={2: 5.0, 3: 50.0}),
        SamplingParams(logit_bias={1: 1.0}),
    ]
    actual = biased(logits, params, [[1], [1]], 1, device)
    assert actual[0].isfinite().nonzero().flatten().tolist() == [2, 7]
    assert actual[0, 2] == logits[0, 2] + 5.0
    assert actual[1].isfinite().all()


def test_allowed_tokens_do_not_change_other_requests() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, VOCAB)
    state = SamplingState(3, torch.device("cpu"))
    for row, params in enumerate(
        [
            SamplingParams(temperature=0),
            SamplingParams(temperature=0, allowed_token_ids=[4]),
            SamplingParams(temperature=0),
        ]
    ):
        state.set(row, spec_of(params, 1), 0)
    load_rows(state)
    rows = np.arange(3, dtype=np.int32)
    tokens = sample(
        logits.clone(), state, torch.zeros(3, 4, dtype=torch.int32), rows, np.ones(3, np.int32)
    )
    assert tokens.tolist() == [int(logits[0].argmax()), 4, int(logits[2].argmax())]
    # The next request in the row may choose all tokens.
    state.set(1, spec_of(SamplingParams(temperature=0), 1), 0)
    tokens = sample(
        logits.clone(), state, torch.zeros(3, 4, dtype=torch.int32), rows, np.ones(3, np.int32)
    )
    assert tokens.tolist() == logits.argmax(-1).tolist()
