"""The prompts of all comparisons, and the sizes of the engine that make them a hard case."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from toolkit.text.tokenizer import Tokenizer

NEW_TOKENS = 8  # of each answer
CACHED_TOKENS = 4  # of an answer from a cached prefix
BUDGET_UNITS = 4  # token budget of a step: more than a prompt, less than a batch of them

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


PICTURE_SIZE = 90, 60  # pixels
WORDS_AROUND = 5  # tokens of text before a picture and after it


class Question(NamedTuple):
    """A prompt, perhaps with its answer. Those with a picture have its place, or all its tokens."""

    tokens: Sequence[int]
    has_picture: bool = False

    @property
    def prompt(self) -> dict[str, Any]:
        """The question as `LLM.generate` takes it."""
        prompt: dict[str, Any] = {"prompt_token_ids": list(self.tokens)}
        return prompt | ({"multi_modal_data": {"image": picture()}} if self.has_picture else {})


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens, of an engine with blocks of `block_size`."""

    block_size: int
    unit: int  # tokens that are cached together: a block, or those between snapshots of states
    context: int  # maximum of the engine
    picture: int = 0  # tokens of the picture; 0: prompts are text

    @classmethod
    def fitting(
        cls, block_size: int, unit: int, made_for: int, wanted: int | None, picture: int = 0
    ) -> Sizes:
        """`made_for`: the model's maximum. `wanted`: the engine's, if the user set it."""
        needed = max(*_lengths(unit), _around(picture)) + NEW_TOKENS
        return cls(block_size, unit, min(needed, made_for) if wanted is None else wanted, picture)

    @property
    def lengths(self) -> list[int]:
        """Prompt lengths."""
        room = max(1, self.context - NEW_TOKENS)
        return [min(length, room) for length in _lengths(self.unit)]

    @property
    def num_blocks(self) -> int:
        """Blocks of a cache that holds all requests at once and little more."""
        lengths = [*self.lengths, *([_around(self.picture)] if self.picture else [])]
        held = sum(-(-(length + NEW_TOKENS) // self.block_size) for length in lengths)
        return max(held + 3, -(-self.context // self.block_size))


def make_prompts(
    sizes: Sizes, tokenizer: Tokenizer | None, vocab_size: int, place: int | None
) -> list[Question]:
    """Return prompts of different texts, and one with a picture if `place` is its token.

    The last two texts have equal blocks after different ones: a block's content depends on all
    before it."""
    tokens = _text(tokenizer, vocab_size, place)
    prompts = []
    begin = 0
    for length in sizes.lengths[:-1]:
        prompts.append([tokens[i % len(tokens)] for i in range(begin, begin + length)])
        begin += length
    other = [tokens[i % len(tokens)] for i in range(begin, begin + sizes.unit)]
    rest = prompts[-1][sizes.unit :]
    questions = [*map(Question, prompts), Question((other + rest + other[:1])[: sizes.lengths[-1]])]
    if place is not None and sizes.picture:
        before, after = tokens[-WORDS_AROUND:], tokens[:WORDS_AROUND]
        questions.append(Question([*before, place, *after], has_picture=True))
    return questions


def picture() -> Any:
    """Return an image of Pillow with random pixels."""
    from PIL import Image

    width, height = PICTURE_SIZE
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def make_filler(sizes: Sizes, vocab_size: int, place: int | None) -> list[Question]:
    """Return prompts of random tokens that need every block of the cache."""
    length = min(sizes.context - 1, max(sizes.lengths) + NEW_TOKENS - 1)
    count = -(-sizes.num_blocks // (length // sizes.block_size or 1))
    tokens = _random_tokens(0, count * length, vocab_size, place)
    return [Question(tokens[at : at + length]) for at in range(0, len(tokens), length)]


def _around(picture: int) -> int:
    """Return the length of the prompt with a picture of this many tokens."""
    return picture + 2 * WORDS_AROUND if picture else 0


def _lengths(unit: int) -> tuple[int, ...]:
    """Return lengths within a unit, of a full one, one more, and several."""
    return 3, unit, unit + 1, 2 * unit + 5, 3 * unit, 3 * unit + 1


def _text(tokenizer: Tokenizer | None, vocab_size: int, place: int | None) -> list[int]:
    """Return the tokens of TEXT; of a model without tokenizer, random ones."""
    if tokenizer is not None:
        tokens = tokenizer.encode(TEXT)
        if max(tokens) < vocab_size:
            return tokens
    return _random_tokens(1, len(TEXT) // 4, vocab_size, place)


def _random_tokens(seed: int, count: int, vocab_size: int, place: int | None) -> list[int]:
    """Return random tokens, none of which stands for a picture."""
    rng = random.Random(seed)
    tokens = (rng.randrange(vocab_size) for _ in range(count))
    return [(token + 1) % vocab_size if token == place else token for token in tokens]
