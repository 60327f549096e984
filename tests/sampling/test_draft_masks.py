"""Masks after drafts: those of a state that followed the same tokens."""

from __future__ import annotations

import random
from concurrent.futures import Future

import numpy as np
import pytest

from toolkit.sampling.grammar import (
    CompiledGrammar,
    GrammarState,
    MaskFiller,
    TokenTable,
    Vocabulary,
)

END = 256
SPELLINGS = [bytes([byte]) for byte in range(256)] + [b"", b"<think>", b"</think>", b"ab", b"bca"]
THINK, THOUGHT = 257, 258
GRAMMARS = {
    "regex": "start: /(ab|ba)*c{1,9}/",
    "choice": 'start: "abcabc" | "abcabd" | "bca"',
    "letters": "start: /[a-d]{3,30}/",
}
STATES = {
    "plain": {},
    "min_tokens": {"min_tokens": 6, "end_ids": [END, ord("c")]},
    "reasoning possible": {"reasoning": "possible"},
    "reasoning begun": {"reasoning": "begun"},
}


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TokenTable(SPELLINGS, [END], [END]))


def allowed(mask: np.ndarray) -> list[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: len(SPELLINGS)]).tolist()


def draft_of(rng: random.Random, tokens: list[int]) -> int:
    """Return a token that may follow, mostly; reasoning ends soon."""
    if rng.random() < 0.2:
        return rng.choice([END, THINK, THOUGHT, -1, *b"abcx"])
    return THOUGHT if THOUGHT in tokens and rng.random() < 0.3 else rng.choice(tokens)


@pytest.mark.parametrize("options", STATES)
@pytest.mark.parametrize("grammar", GRAMMARS)
def test_masks_after_drafts_are_those_after_tokens(
    vocabulary: Vocabulary, grammar: str, options: str
):
    compiled: Future[CompiledGrammar] = Future()
    compiled.set_result(CompiledGrammar(vocabulary, GRAMMARS[grammar]))
    filler, rng = MaskFiller(len(SPELLINGS)), random.Random(0)

    def state_after(tokens: list[int]) -> GrammarState:
        state = GrammarState(compiled, **STATES[options])
        state.follow(tokens)
        assert state.error is None
        return state

    def mask_after(tokens: list[int]) -> list[int]:
        return allowed(filler.fill([(state_after(tokens), [])])[0])

    num_right = num_forbidden = 0
    for _ in range(20):
        tokens: list[int] = []
        state = state_after([])
        while END not in tokens and len(tokens) < 20:
            drafts, expected = [], [mask_after(tokens)]
            is_right = True
            for _ in range(rng.randint(0, 4)):
                draft = draft_of(rng, expected[-1] if is_right else [ord("a")])
                # After a forbidden draft, or one that ends the request, no token is sampled.
                is_right = is_right and draft in expected[-1]
                is_right = is_right and draft not in STATES[options].get("end_ids", [])
                drafts.append(draft)
                after = [*tokens, *drafts]
                expected.append(mask_after(after) if is_right else [*range(len(SPELLINGS))])
                num_right, num_forbidden = num_right + is_right, num_forbidden + (not is_right)
            masks = filler.fill([(None, []), (state, drafts)])
            assert [allowed(mask) for mask in masks[1:]] == expected
            assert (masks[0] == -1).all()
            # The state is that before the drafts, and follows other tokens.
            tokens.append(draft_of(rng, expected[0]))
            if tokens[-1] not in expected[0]:
                tokens[-1] = rng.choice(expected[0])
            state.follow(tokens)
            assert state.error is None
    assert min(num_right, num_forbidden) > 25
