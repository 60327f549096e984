"""Differences of log-probabilities, and the bounds of those that rounding explains.

A bound is measured on the model at hand. Plain PyTorch computes it twice: in fp32, and in the types
that are served (16 bits, 8-bit weights, an FP8 cache). The difference of the two is what rounding
does to this model. A correct path differs by about as much, whatever its kernels.

In fp32 a path differs by less: the difference of bfloat16 is divided by the ratio of the precisions
of the two types."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

NUM_LIKELIEST = 20
"""Tokens at each position whose log-probabilities are compared, and the next token."""
MEAN_FACTOR, MAX_FACTOR = 2.0, 3.0
"""Bounds over the measured differences. A path that rounds as often as plain PyTorch has 1. The
maximum of a few hundred positions varies more than their mean."""
FP32_SHARE = 2.0**-10
"""Differences in fp32 over those in bfloat16: 2^-16 by the types, times 2^6, since fp32 also rounds
inside of sums, which bfloat16 does not: their error grows with the root of thousands of terms."""
LEAST = 1e-6
"""Least bound. Log-probabilities are sent in fp32."""

Chances = Mapping[int, float]
"""Log-probabilities of the likeliest tokens, and of the next one."""


@dataclass(frozen=True, slots=True)
class Scored:
    """A sequence, and the log-probabilities of tokens at some of its positions.

    Those at position p follow the tokens before p."""

    tokens: Sequence[int]
    chances: Mapping[int, Chances]


class Place(NamedTuple):
    """A token at a position of one of the sequences that were compared."""

    pair: int
    position: int
    token: int


@dataclass(slots=True)
class Difference:
    """Absolute differences of the log-probabilities of two paths."""

    num_positions: int = 0
    num_agreed: int = 0
    """Positions where both have the same likeliest token."""
    max: float = 0.0
    place: Place | None = None  # of the maximum
    _sum: float = field(default=0.0, repr=False)
    _count: int = field(default=0, repr=False)

    @property
    def mean(self) -> float:
        return self._sum / max(1, self._count)

    def add(self, value: float, place: Place) -> None:
        value = value if math.isfinite(value) else math.inf
        self._sum += value
        self._count += 1
        if value > self.max or self.place is None:
            self.max, self.place = value, place


class Bound(NamedTuple):
    """Largest differences that rounding explains."""

    mean: float
    max: float

    @classmethod
    def of(cls, rounding: Difference, share: float = 1.0) -> Bound:
        """`share`: of the measured rounding that remains in a more precise type."""
        return cls(
            max(LEAST, MEAN_FACTOR * share * rounding.mean),
            max(LEAST, MAX_FACTOR * share * rounding.max),
        )

    def allows(self, difference: Difference) -> bool:
        return difference.mean <= self.mean and difference.max <= self.max


def compare(pairs: Iterable[tuple[Scored, Scored]]) -> Difference:
    """Compare pairs of sequences at the positions that both have scored, as far as they are equal.

    Two greedy answers may diverge where two tokens are equally likely. The position where they do
    is still compared."""
    found = Difference()
    for index, (one, other) in enumerate(pairs):
        equal = _equal_tokens(one.tokens, other.tokens)
        for position in sorted(one.chances.keys() & other.chances.keys()):
            if position > equal:
                break
            first, second = one.chances[position], other.chances[position]
            for token in first.keys() | second.keys():
                value = _difference(first, second, token)
                if value is not None:
                    found.add(value, Place(index, position, token))
            found.num_positions += 1
            found.num_agreed += _likeliest(first) == _likeliest(second)
    return found


def _equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _difference(first: Chances, second: Chances, token: int) -> float | None:
    """Return the difference for a token; None if it is unknown.

    A token that one path does not list is no likelier there than the last of the likeliest."""
    if token in first and token in second:
        return abs(first[token] - second[token])
    has, lacks = (first, second) if token in first else (second, first)
    least = has[token] - sorted(lacks.values(), reverse=True)[:NUM_LIKELIEST][-1]
    return least if least > 0 else None


def _likeliest(chances: Chances) -> int:
    return max(chances, key=lambda token: chances[token])
