"""Combinations of parameters for slow tests, as in Triton's interpreter."""

from __future__ import annotations

import collections
import heapq
from collections.abc import Sequence
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return combinations that cover every pair of values of two parameters: far fewer than all."""
    bits = collections.defaultdict[Any, int](lambda: 1 << len(bits))
    every: list[tuple[tuple[int, ...], int]] = [((), 0)]  # combinations, each pair of values a bit
    for values in parameters:
        every = [
            ((*one, new), pairs + sum([bits[old, len(one), new] for old in enumerate(one)]))
            for one, pairs in every
            for new in range(len(values))
        ]
    missing, chosen = (1 << len(bits)) - 1, []
    # A combination never covers more missing pairs than when it was last counted.
    heap = [(-pairs.bit_count(), one, pairs) for one, pairs in every]
    heapq.heapify(heap)
    while missing:
        counted, one, pairs = heap[0]
        count = (missing & pairs).bit_count()
        if count < -counted:
            heapq.heapreplace(heap, (-count, one, pairs))
        else:
            chosen.append(one)
            missing &= ~pairs
    return [
        tuple(values[i] for values, i in zip(parameters, combination, strict=True))
        for combination in chosen
    ]
