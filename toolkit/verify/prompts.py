"""The prompts of all comparisons, and the sizes of the engine that make them a hard case."""

from __future__ import annotations

import random
from dataclasses import dataclass

from toolkit.text.tokenizer import Tokenizer

NEW_TOKENS = 8  # of each answer
CACHED_TOKENS = 4  # of an answer from a cached prefix
NUM_PROMPTS = 6
BUDGET_BLOCKS = 4  # token budget of a step: more than a prompt, less than a batch of them

TEXT = """The harbour was quiet when the first boats came back. Nets lay in heaps along the wall,
and gulls walked between them as if they owned the place. Anna counted the crates twice: 14 of
mackerel, 9 of plaice, and one without a label. "Who packed this?" she asked. Her brother
shrugged and pointed at the lighthouse, where a man in a yellow coat was painting the railing. In
1962 the railing had been red; their grandfather kept a photograph of it above the stove. By noon
the fog had lifted. They loaded the van, checked the ropes, and drove north on the coast road, past
the school, the empty cannery and the field where, every second Sunday, the market was held. Prices
had risen again: bread cost 3.20, coffee 4.75, and a litre of diesel more than either of them wanted
to say aloud. Still, the fish would be in the city before evening, and the ice would last. She
opened the window, listened to the engine, and began to write the list for the next day. The code
for the gate, she remembered, was def open(n): return n % 7 == 3, a joke of the old keeper.
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, of an engine with blocks of `block_size`."""

    block_size: int
    context: int  # maximum of the engine

    @classmethod
    def fitting(cls, block_size: int, made_for: int, wanted: int | None) -> Sizes:
        """`made_for`: the model's maximum. `wanted`: the engine's, if the user set it."""
        needed = max(_lengths(block_size)) + NEW_TOKENS
        return cls(block_size, min(needed, made_for) if wanted is None else wanted)

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths."""
        room = max(1, self.context - NEW_TOKENS)
        return [min(length, room) for length in _lengths(self.block_size)]

    @property
    def num_blocks(self) -> int:
        """Blocks of a cache that holds all requests at once and little more."""
        held = sum(-(-(length + NEW_TOKENS) // self.block_size) for length in self.lengths)
        return max(held + 3, -(-self.context // self.block_size))


def make_prompts(sizes: Sizes, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """Return prompts of different texts, in tokens.

    The last two have equal blocks after different ones: a block's content depends on all before
    it."""
    tokens = _text(tokenizer, vocab_size)
    prompts = []
    begin = 0
    for length in sizes.lengths[:-1]:
        prompts.append([tokens[i % len(tokens)] for i in range(begin, begin + length)])
        begin += length
    other = [tokens[i % len(tokens)] for i in range(begin, begin + sizes.block_size)]
    rest = prompts[-1][sizes.block_size :]
    return [*prompts, (other + rest + other[:1])[: sizes.lengths[-1]]]


def make_filler(sizes: Sizes, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens that need every block of the cache."""
    rng = random.Random(0)
    length = min(sizes.context - 1, max(sizes.lengths) + NEW_TOKENS - 1)
    count = -(-sizes.num_blocks // (length // sizes.block_size or 1))
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def _lengths(block: int) -> tuple[int, ...]:
    """Return lengths within a block, of a full one, one more, and several."""
    return 3, block, block + 1, 2 * block + 5, 3 * block, 3 * block + 1


def _text(tokenizer: Tokenizer | None, vocab_size: int) -> list[int]:
    """Return the tokens of TEXT; of a model without tokenizer, random ones."""
    if tokenizer is not None:
        tokens = tokenizer.encode(TEXT)
        if max(tokens) < vocab_size:
            return tokens
    rng = random.Random(1)
    return [rng.randrange(vocab_size) for _ in range(len(TEXT) // 4)]
