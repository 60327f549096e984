"""Workloads of the engine benchmarks. They depend only on a model's context and vocabulary."""

import random
from dataclasses import dataclass, replace

SHORT_CONTEXT = 1024  # models with a context up to this many tokens get shorter prompts and answers

WARM_UP_LEN = 16  # most tokens of answers of a wave that warms up: nothing is compiled later
MAX_TOKEN_ID = 10_000  # highest token id in prompts. Every vocabulary of a usual size has it


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to run together: token ids of each prompt, and length of each answer."""

    name: str
    prompts: list[list[int]]
    output_lens: list[int]
    num_warm_up: int | None = None  # requests that run to warm up; None: all
    warm_up_len: int | None = None  # most tokens of their answers; None: as many as measured

    @property
    def warm_up(self) -> "Workload":
        """The first requests, which run before the measurement."""
        first = slice(self.num_warm_up)
        lens = self.output_lens[first]
        if self.warm_up_len is not None:
            lens = [min(length, self.warm_up_len) for length in lens]
        return replace(self, prompts=self.prompts[first], output_lens=lens)

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
) -> Workload:
    """Return prompts and answers of 100 to 1024 tokens each, 16 to 512 in a short context.

    Lengths are uniform. nano-vllm publishes its throughput for this mix."""
    low, high = (16, 512) if context <= SHORT_CONTEXT else (100, 1024)
    low = low if shortest is None else shortest
    high = high if longest is None else longest
    low = min(low, high)
    rng = random.Random(0)
    prompts = [_ids(rng, rng.randint(low, high), vocab_size) for _ in range(count)]
    return Workload("offline", prompts, [rng.randint(low, high) for _ in range(count)])


def throughput(
    context: int,
    vocab_size: int,
    *,
    count: int,
    wave: int,
    input_len: int | None = None,
    output_len: int | None = None,
) -> Workload:
    """Return prompts and answers of 1000 tokens each, 200 in a short context.

    `wave`: requests that run at once."""
    usual = 200 if context <= SHORT_CONTEXT else 1000
    rng = random.Random(3)
    prompts = [_ids(rng, input_len or usual, vocab_size) for _ in range(count)]
    lens = [output_len or usual] * count
    return Workload("throughput", prompts, lens, num_warm_up=wave, warm_up_len=WARM_UP_LEN)


def latency(
    batch_size: int, vocab_size: int, *, input_len: int = 128, output_len: int = 256
) -> Workload:
    rng = random.Random(1)
    prompts = [_ids(rng, input_len, vocab_size) for _ in range(batch_size)]
    return Workload("latency", prompts, [output_len] * batch_size)


def prefill(
    context: int, vocab_size: int, *, count: int = 32, input_len: int | None = None
) -> Workload:
    """Return prompts of 2048 tokens (1000 in a short context) with answers of one token."""
    if input_len is None:
        input_len = 1000 if context <= SHORT_CONTEXT else 2048
    rng = random.Random(2)
    return Workload(
        "prefill", [_ids(rng, input_len, vocab_size) for _ in range(count)], [1] * count
    )


def _ids(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    top = min(MAX_TOKEN_ID, vocab_size - 1)
    return [rng.randint(0, top) for _ in range(length)]
