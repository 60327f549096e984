"""The work of the engine benchmarks. It depends on the model's context and vocabulary alone, so that engines can
be compared on the very same prompts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

SHORT_CONTEXT = 1024
"""Tokens: at most this much context halves the lengths."""

TOP_ID = 10_000
"""Prompts are drawn from token ids up to this one: every vocabulary of the usual sizes has them."""


@dataclass(frozen=True, slots=True)
class Work:
    """Requests to run together: each prompt's token ids, and how many tokens each answer gets."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        return max(len(p) + n for p, n in zip(self.prompts, self.output_lens, strict=True))


def offline(
    context: int,
    vocab_size: int,
    *,
    count: int = 256,
    shortest: int | None = None,
    longest: int | None = None,
) -> Work:
    """Prompts and answers of lengths drawn evenly: 100 to 1024 tokens each, 16 to 512 in a short context.

    The mix is the one that nano-vllm publishes its throughput for.
    """
    low, high = (16, 512) if context <= SHORT_CONTEXT else (100, 1024)
    low = low if shortest is None else shortest
    high = high if longest is None else longest
    low = min(low, high)
    rng = random.Random(0)
    prompts = [_ids(rng, rng.randint(low, high), vocab_size) for _ in range(count)]
    return Work("offline", prompts, [rng.randint(low, high) for _ in range(count)])


def latency(
    batch_size: int, vocab_size: int, *, input_len: int = 128, output_len: int = 256
) -> Work:
    """A batch of equal lengths."""
    rng = random.Random(1)
    prompts = [_ids(rng, input_len, vocab_size) for _ in range(batch_size)]
    return Work("latency", prompts, [output_len] * batch_size)


def prefill(
    context: int, vocab_size: int, *, count: int = 32, input_len: int | None = None
) -> Work:
    """Prompts of 2048 tokens, 1000 in a short context, and answers of one token."""
    if input_len is None:
        input_len = 1000 if context <= SHORT_CONTEXT else 2048
    rng = random.Random(2)
    return Work("prefill", [_ids(rng, input_len, vocab_size) for _ in range(count)], [1] * count)


def _ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    top = min(TOP_ID, vocab_size - 1)
    return [rng.randint(0, top) for _ in range(length)]
