"""Cases of the parity tests: every architecture, its prompts, and Transformers' greedy tokens."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import checkpoints
from tests.checkpoints import ARCHITECTURES, NEW_TOKENS, VOCAB

LENGTHS = (1, 5, 16, 33, 50, 64)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request, checkpoint: Callable[[str], Path]):
    """Return (name, folder, Transformers model in fp32 on the CPU, prompts, greedy tokens)."""
    name = request.param
    model = checkpoints.make_reference(name)
    rng = random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = [checkpoints.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    return name, checkpoint(name), model, prompts, expected
