"""Cases of the parity tests: every architecture, its prompts, and Transformers' outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import NEW_TOKENS, VOCAB
from tests.models.architectures import ARCHITECTURES, MAX_MODEL_LEN, SHORTEST_PROMPT
from toolkit import LLM, RequestOutput

FEW = ("gpt2", "mistral-window", "qwen3")
SMALL_POOL = {"num_gpu_blocks_override": 44, "block_size": 4, "enable_prefix_caching": False}
"""Settings of a cache that holds little more than one request of full length."""
LENGTHS = (1, 5, 16, 33, 50, 96)


class Case:
    """An architecture. Its reference runs each sequence alone, in fp32 on the CPU, uncached."""

    def __init__(self, name: str, folder: Path, model: torch.nn.Module | None = None) -> None:
        self.name, self.folder = name, folder
        self.model = model or checkpoints.make_reference(name)
        rng, shortest = random.Random(name), SHORTEST_PROMPT.get(name, 1)
        self.prompts = [
            [rng.randrange(VOCAB) for _ in range(max(length, shortest))] for length in LENGTHS
        ]
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def engine(self, **settings: object) -> LLM:
        limits = {"max_model_len": MAX_MODEL_LEN[self.name]} if self.name in MAX_MODEL_LEN else {}
        return LLM(str(self.folder), **limits, **settings)

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return Transformers' logits [len(tokens), vocab]."""
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = checkpoints.logits(self.model, list(key))
        return self._logits[key]

    def assert_greedy(
        self,
        results: list[RequestOutput],
        tolerance: float = 1e-4,
        num_tokens: int = NEW_TOKENS,
    ) -> None:
        """Check that each token is the likeliest after those before it, up to `tolerance`.

        By induction, the answer is then the reference's greedy answer."""
        for result in results:
            for answer in result.outputs:
                tokens = list(answer.token_ids)
                assert len(tokens) == num_tokens
                logits = self.logits(result.prompt_token_ids + tokens)
                at = logits[len(result.prompt_token_ids) - 1 : -1]
                behind = at.max(-1).values - at.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
                assert float(behind.max()) < tolerance, (self.name, int(behind.argmax()))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    return Case(request.param, checkpoint(request.param))


@pytest.fixture(scope="module", params=FEW)
def few(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    """Return a case for tests that depend on the engine more than on the model."""
    return Case(request.param, checkpoint(request.param))
