"""The parity suites' cases: every architecture, its prompts, and what Transformers makes of them."""

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
    """(name, folder, Transformers model in fp32 on the CPU, prompts, the greedy tokens it gives for each)."""
    name = request.param
    model = checkpoints.make_reference(name)
    rng = random.Random(name)
    prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = [checkpoints.greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    return name, checkpoint(name), model, prompts, expected
