"""Combinations of parameters for slow tests, as in Triton's interpreter."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that cover every pair of values of two parameters: far fewer than all."""

    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    bits = collections.defaultdict[Any, int](lambda: 1 << len(bits))
    pairs = {  # each pair of values is a bit
        one: sum(bits[pair] for pair in itertools.combinations(enumerate(one), 2)) for one in every
    }
    missing, chosen = (1 << len(bits)) - 1, []
    while missing:
        chosen.append(max(every, key=lambda one: (missing & pairs[one]).bit_count()))
        missing &= ~pairs[chosen[-1]]
    return [
        tuple(values[i] for values, i in zip(parameters, combination, strict=True))
        for combination in chosen
    ]
