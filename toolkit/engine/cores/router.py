"""Routing of requests to one of several engine cores."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

import numpy as np

from toolkit.sequence import SequenceSpec

BLOCK = 16  # tokens of the shortest prefix that is tracked
GROWTH = 8  # each tracked prefix is longer than the previous one by at most 1/8, or by one block
ANSWER_TOKENS = 64
"""Estimated tokens of an open answer. max_tokens is mostly far above the actual length."""


class Prefix(NamedTuple):
    """A prefix of a prompt. `size`: tokens beyond the previous prefix."""

    digest: bytes
    length: int
    size: int


@dataclass(slots=True)
class Placement:
    """Remaining cost of a request on its core, in tokens."""

    core: int
    prompt: int
    answers: int
    num_sequences: int


class Router:
    """Chooses a core by its open work and the prompt prefixes that it has cached.

    A request goes to the core that would finish it first if every token had the same cost. The
    estimate is the sum of

        prompt tokens still to compute + tokens of open answers + uncached tokens of this prompt

    So a prompt goes to the core that has cached its prefix, until that core is so busy that
    computing the prefix again elsewhere is faster than waiting. The first block breaks ties, so
    that several front ends agree. Each of them knows the prefixes and costs of its own requests
    only. The supervisor sends them the number of sequences on each core, at most every 20 ms."""

    def __init__(self, num_cores: int) -> None:
        self._loads = [0] * num_cores
        self._num_sequences = [0] * num_cores
        self._other_loads = [0] * num_cores  # load from other front ends, in tokens
        self._seen_prefixes = [_SeenPrefixes(0) for _ in range(num_cores)]

    def connect(self, core: int, capacity: int, *, has_states: bool = False) -> None:
        """Register a core with an empty cache for `capacity` tokens.

        has_states: a prefix is of use only where the core has a snapshot of states."""
        self._seen_prefixes[core] = _SeenPrefixes(capacity, has_states=has_states)

    def clear_prefixes(self, core: int) -> None:
        """Drop the prefixes of a core that has evicted its cache."""
        self._seen_prefixes[core].clear()

    def observe_loads(self, num_sequences: Sequence[int]) -> None:
        """Update the number of sequences on each core, including those of other front ends."""
        self._other_loads = [
            ANSWER_TOKENS * max(0, count - own)
            for count, own in zip(num_sequences, self._num_sequences, strict=True)
        ]

    def place(
        self, spec: SequenceSpec, candidates: Sequence[int], *, caches: bool = True
    ) -> Placement:
        """Choose one of `candidates` and add the request to its load."""
        prompt, num_answers = spec.prompt_token_ids, spec.params.n
        caches = caches and spec.pooling is None
        prefixes = list(_prefixes(spec)) if caches else []
        tie_break = prefixes[0].digest[0] if prefixes else 0
        count = len(self._loads)
        missing = {
            core: len(prompt) - self._seen_prefixes[core].known_length(prefixes)
            for core in candidates
        }
        core = min(
            candidates,
            key=lambda core: (
                self._loads[core] + self._other_loads[core] + missing[core],
                (core - tie_break) % count,
            ),
        )
        self._seen_prefixes[core].add(prefixes)
        placement = Placement(
            core, missing[core], num_answers * min(spec.max_tokens, ANSWER_TOKENS), num_answers
        )
        self._loads[core] += placement.prompt + placement.answers
        self._num_sequences[core] += num_answers
        return placement

    def mark_computed(self, placement: Placement) -> None:
        """Remove the cost of a computed prompt."""
        self._loads[placement.core] -= placement.prompt
        placement.prompt = 0

    def release(self, placement: Placement) -> None:
        """Remove a finished request from its core's load."""
        self._loads[placement.core] -= placement.prompt + placement.answers
        self._num_sequences[placement.core] -= placement.num_sequences
        placement.prompt = placement.answers = placement.num_sequences = 0


class _SeenPrefixes:
    """Most recent prefixes of a core, limited by the size of its cache.

    The core's cache also evicts the least recently used blocks."""

    def __init__(self, capacity: int, *, has_states: bool = False) -> None:
        self._capacity, self._has_states = capacity, has_states
        self._snapshots: set[bytes] = set()  # prefixes with states (`scheduler.states`)
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._size = 0

    def known_length(self, prefixes: Sequence[Prefix]) -> int:
        """Return the length of the longest known prefix, in tokens."""
        known = self._snapshots if self._has_states else self._sizes
        return next((one.length for one in reversed(prefixes) if one.digest in known), 0)

    def add(self, prefixes: Sequence[Prefix]) -> None:
        """Add prefixes, the longest first: it is dropped first.

        States are kept at the end of a prompt, and where it parts from those before it."""
        if self._has_states:
            seen = (one.digest for one in reversed(prefixes) if one.digest in self._sizes)
            ends = [one.digest for one in prefixes[-1:]]
            self._snapshots.update([*ends, *islice(seen, 1)])
        for digest, _, size in reversed(prefixes):
            if digest not in self._sizes:
                self._size += size
                self._sizes[digest] = size
            self._sizes.move_to_end(digest)
        while self._size > self._capacity and self._sizes:
            digest, size = self._sizes.popitem(last=False)
            self._size -= size
            self._snapshots.discard(digest)

    def clear(self) -> None:
        self._sizes.clear()
        self._snapshots.clear()
        self._size = 0


def _prefixes(spec: SequenceSpec) -> Iterator[Prefix]:
    """Yield the tracked prefixes: about a hundred for a million tokens."""
    tokens = np.asarray(spec.prompt_token_ids, np.int32)
    digest = blake2b(spec.cache_key.encode(), digest_size=16).digest()
    length, num_blocks = 0, 1
    while (end := num_blocks * BLOCK) <= len(tokens):
        features = spec.features_key(length, end).encode() if spec.features else b""
        content = digest + tokens[length:end].tobytes() + features
        digest = blake2b(content, digest_size=16).digest()
        yield Prefix(digest, end, end - length)
        length = end
        num_blocks += max(1, num_blocks // GROWTH)
