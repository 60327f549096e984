"""Which of several engine cores a request goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from toolkit.sequence import SequenceSpec

BLOCK = 16
"""Tokens of the shortest beginning that is told apart."""
GROWTH = 8
"""Of the lengths of beginnings that are told apart, each is at most 1/8 longer than the one before, or one block."""
ANSWER = 64
"""Tokens for which an open answer counts: what one may have is mostly far more than what it will."""


class Beginning(NamedTuple):
    """One of a prompt's beginnings; `size` is what it has more than the one before. Both in tokens."""

    digest: bytes
    length: int
    size: int


@dataclass(slots=True)
class Share:
    """What a request still costs the core that it went to, in tokens."""

    core: int
    prompt: int
    answers: int
    num_sequences: int


class Router:
    """Knows what it has sent to each core and not got back, and which beginnings of prompts each has seen.

    A request goes to the core that is done with it first, if every token costs the same: the one with the least of

        tokens of prompts that it has to compute + tokens of answers that are open + tokens of this prompt that it has not seen

    So a core keeps the prompts that it knows, until it has so much more to do than another that computing the known
    part again costs less than waiting. Where nothing decides, a prompt's first block does, so that several front ends agree.
    """

    def __init__(self, num_cores: int) -> None:
        self._loads = [0] * num_cores
        self._num_sequences = [0] * num_cores
        self._others = [0] * num_cores
        """What other front ends have sent to each, in tokens."""
        self._seen = [_Beginnings(0) for _ in range(num_cores)]

    def connect(self, core: int, capacity: int) -> None:
        """A core begins with an empty cache for so many tokens."""
        self._seen[core] = _Beginnings(capacity)

    def forget_prompts(self, core: int) -> None:
        """A core has forgotten what it had cached."""
        self._seen[core].clear()

    def observe(self, num_sequences: Sequence[int]) -> None:
        """Takes in how many sequences each core has, whoever sent them."""
        self._others = [
            ANSWER * max(0, told - own)
            for told, own in zip(num_sequences, self._num_sequences, strict=True)
        ]

    def place(self, spec: SequenceSpec, among: Sequence[int], *, caches: bool = True) -> Share:
        """Choose one of the cores and count the request as its own. `caches`: they keep prompts."""
        prompt, num_answers = spec.prompt_token_ids, spec.params.n
        caches = caches and spec.pooling is None
        beginnings = list(_beginnings(prompt, spec.cache_salt)) if caches else []
        home = beginnings[0].digest[0] if beginnings else 0
        count = len(self._loads)
        missing = {core: len(prompt) - self._seen[core].length_known(beginnings) for core in among}
        core = min(
            among,
            key=lambda core: (
                self._loads[core] + self._others[core] + missing[core],
                (core - home) % count,
            ),
        )
        self._seen[core].add(beginnings)
        share = Share(core, missing[core], num_answers * min(spec.max_tokens, ANSWER), num_answers)
        self._loads[core] += share.prompt + share.answers
        self._num_sequences[core] += num_answers
        return share

    def computed(self, share: Share) -> None:
        """The request's prompt is computed."""
        self._loads[share.core] -= share.prompt
        share.prompt = 0

    def end(self, share: Share) -> None:
        """The core has the request no more."""
        self._loads[share.core] -= share.prompt + share.answers
        self._num_sequences[share.core] -= share.num_sequences
        share.prompt = share.answers = share.num_sequences = 0


class _Beginnings:
    """The beginnings that a core has seen last: as many as its cache holds, as that drops what was used least recently, too."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._size = 0

    def length_known(self, beginnings: Sequence[Beginning]) -> int:
        """Tokens of the longest beginning that it knows."""
        for beginning in reversed(beginnings):
            if beginning.digest in self._sizes:
                return beginning.length
        return 0

    def add(self, beginnings: Sequence[Beginning]) -> None:
        """The longest is the first to be forgotten."""
        for digest, _, size in reversed(beginnings):
            if digest not in self._sizes:
                self._size += size
                self._sizes[digest] = size
            self._sizes.move_to_end(digest)
        while self._size > self._capacity and self._sizes:
            self._size -= self._sizes.popitem(last=False)[1]

    def clear(self) -> None:
        self._sizes.clear()
        self._size = 0


def _beginnings(prompt: Sequence[int], salt: str) -> Iterator[Beginning]:
    """Of a prompt of a million tokens there are about a hundred."""
    tokens = np.asarray(prompt, np.int32)
    digest = blake2b(salt.encode(), digest_size=16).digest()
    length, num_blocks = 0, 1
    while (end := num_blocks * BLOCK) <= len(tokens):
        digest = blake2b(digest + tokens[length:end].tobytes(), digest_size=16).digest()
        yield Beginning(digest, end, end - length)
        length = end
        num_blocks += max(1, num_blocks // GROWTH)
