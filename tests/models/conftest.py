"""Cases of the parity tests: every architecture, its prompts, and Transformers' outputs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests import checkpoints
from tests.checkpoints import NEW_TOKENS, VOCAB, Model
from tests.models.architectures import ARCHITECTURES, MAX_MODEL_LEN, SHORTEST_PROMPT
from tests.references import Reference
from tests.worker.gpu_runners import gpu_runner, rerun_graphs
from toolkit import LLM, RequestOutput

__all__ = ["gpu_runner", "rerun_graphs"]
FEW = ("gpt2", "mistral-window", "qwen3")
SMALL_POOL = {"num_gpu_blocks_override": 44, "block_size": 4, "enable_prefix_caching": False}
"""Settings of a cache that holds little more than one request of full length."""
LENGTHS = (1, 5, 16, 33, 50, 96)


class Case:
    """An architecture. Its reference runs each sequence alone, in fp32 on the CPU, uncached."""

    def __init__(self, name: str, folder: Path, model: Model | None = None) -> None:
        self.name, self.folder = name, folder
        self.model = model or checkpoints.make_reference(name)
        lengths = [max(length, SHORTEST_PROMPT.get(name, 1)) for length in LENGTHS]
        self._clear: list[list[int]] = []  # prompts after which no token is a near-tie
        if isinstance(self.model, Reference):
            self.prompts = self._clear = self.model.prompts(lengths, NEW_TOKENS, VOCAB)
        else:
            rng = random.Random(name)
            self.prompts = [[rng.randrange(VOCAB) for _ in range(length)] for length in lengths]
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def engine(self, **settings: object) -> LLM:
        """Load the model. The cache of more rows would have more blocks, which each step checks."""
        limits: dict[str, object] = {"max_num_seqs": 20}
        if self.name in MAX_MODEL_LEN:
            limits["max_model_len"] = MAX_MODEL_LEN[self.name]
        return LLM(str(self.folder), **(limits | settings))

    def logits(self, tokens: Sequence[int], positions: slice = slice(None)) -> torch.Tensor:
        """Return Transformers' logits [positions, vocab]."""
        if isinstance(self.model, Reference):
            return self.model.logits(tokens, positions)
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = checkpoints.logits(self.model, list(key))
        return self._logits[key][positions]

    def assert_greedy(
        self,
        results: list[RequestOutput],
        tolerance: float | None = None,
        num_tokens: int = NEW_TOKENS,
    ) -> None:
        """Check that the answers are the reference's.

        Or, with a tolerance and for other prompts, that each token is the likeliest after those
        before it, up to `tolerance`: by induction, the answer is then the reference's, too."""
        for result in results:
            prompt = result.prompt_token_ids
            for answer in result.outputs:
                tokens = list(answer.token_ids)
                assert len(tokens) == num_tokens
                if tolerance is None and prompt in self._clear:
                    expected = checkpoints.greedy(self.model, prompt, NEW_TOKENS)
                    assert tokens == expected[:num_tokens], self.name
                    continue
                at = self.logits(prompt + tokens)[len(prompt) - 1 : -1]
                behind = at.max(-1).values - at.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
                assert float(behind.max()) < (tolerance or 1e-4), (self.name, int(behind.argmax()))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def case(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    return Case(request.param, checkpoint(request.param))


@pytest.fixture(scope="module", params=FEW)
def few(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Case:
    """Return a case for tests that depend on the engine more than on the model."""
    return Case(request.param, checkpoint(request.param))
