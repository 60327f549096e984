"""Combinations of parameters for slow tests, as in Triton's interpreter."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that cover every pair of values of two parameters: far fewer than all."""

    def pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return set(itertools.combinations(enumerate(combination), 2))

    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    missing, chosen = set().union(*map(pairs, every)), []
    while missing:
        chosen.append(max(every, key=lambda combination: len(missing & pairs(combination))))
        missing -= pairs(chosen[-1])
    return [
        tuple(values[i] for values, i in zip(parameters, combination, strict=True))
        for combination in chosen
    ]
