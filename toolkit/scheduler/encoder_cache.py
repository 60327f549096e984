"""Pages of the devices' table of features: rows that an encoder has computed, and prompts read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from toolkit.scheduler.output import Encode
from toolkit.sequence import Feature

ROWS_PER_PAGE = 64


@dataclass(slots=True)
class _Entry:
    """A feature in the cache."""

    pages: list[int]
    step: int  # that computes it
    loader: Hashable  # for which it was computed
    users: set[tuple[Hashable, Feature]] = field(default_factory=set)
    """One prompt may have equal features at several positions."""


class EncoderCache:
    """Gives features pages while requests use them, and keeps the most recently used ones.

    Steps run in order: pages that a step reads may be given away in the next."""

    def __init__(self, num_pages: int, rows_per_page: int) -> None:
        self._rows_per_page = rows_per_page
        self._free = list(range(num_pages - 1, -1, -1))
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()  # least recently used first
        self.num_pages = num_pages

    def num_for(self, feature: Feature) -> int:
        """Return how many pages a feature needs."""
        return -(-feature.num_rows // self._rows_per_page)

    def is_ready(self, feature: Feature, step: int) -> bool:
        """Return True if an earlier step computes a feature."""
        entry = self._entries.get(feature.digest)
        return entry is not None and entry.step < step

    def load(
        self, feature: Feature, step: int, keep: Collection[Feature], loader: Hashable
    ) -> Encode | None:
        """Give a feature pages, for this step to compute. None: too few are free, or unused.

        `keep`: features that stay in the cache; `loader`: the user that needs it."""
        kept = {one.digest for one in keep}
        needed = self.num_for(feature)
        unused = [
            digest
            for digest, entry in self._entries.items()
            if not entry.users
            and digest not in kept
            and entry.step < step  # else two features could take turns for ever
        ]
        while len(self._free) < needed and unused:
            self._free += self._entries.pop(unused.pop(0)).pages
        if len(self._free) < needed:
            return None
        pages = [self._free.pop() for _ in range(needed)]
        self._entries[feature.digest] = _Entry(pages, step, loader)
        return Encode(feature.digest, pages, feature.grid)

    def __contains__(self, feature: Feature) -> bool:
        return feature.digest in self._entries

    def hold(self, feature: Feature, user: Hashable) -> bool:
        """Keep a feature in the cache for a user. Return True if another one had it computed."""
        entry = self._entries[feature.digest]
        entry.users.add((user, feature))
        self._entries.move_to_end(feature.digest)
        return entry.loader is not user

    def release(self, feature: Feature, user: Hashable) -> None:
        """Note that a user no longer needs a feature."""
        if (entry := self._entries.get(feature.digest)) is not None:
            entry.users.discard((user, feature))

    def clear(self) -> None:
        """Forget all features: what the devices have is unknown."""
        for entry in self._entries.values():
            self._free += entry.pages
        self._entries.clear()

    def problem(self) -> str | None:
        """Return what is wrong with the accounts, or None."""
        held = [page for entry in self._entries.values() for page in entry.pages]
        if sorted((*self._free, *held)) != list(range(self.num_pages)):
            return f"pages of the encoder cache are free or held: {self._free}, {held}"
        return None
