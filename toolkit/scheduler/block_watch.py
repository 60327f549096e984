"""How long cached blocks live and are of use, seen in a sample of them."""

from __future__ import annotations

import time
from collections.abc import Callable

SAMPLED = 64
"""One block in so many is watched, so that watching costs nothing."""


class BlockWatch:
    """The lives of some blocks. A life goes from when a block is handed out to when its content is overwritten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.lifetimes: list[float] = []
        """Seconds of the lives that have ended since `take`, as are the others."""
        self.idle: list[float] = []
        """From a block's last use to the end of its life."""
        self.reuse_gaps: list[float] = []
        """Between two uses by requests."""

    def handed_out(self, block: int) -> None:
        """A life begins."""
        if block % SAMPLED == 0:
            self._born[block] = self._used[block] = self._clock()

    def reused(self, block: int) -> None:
        """Another request found its content."""
        if block % SAMPLED == 0 and block in self._used:
            now = self._clock()
            self.reuse_gaps.append(now - self._used[block])
            self._used[block] = now

    def let_go(self, block: int) -> None:
        """A request that held it is done with it."""
        if block % SAMPLED == 0 and block in self._used:
            self._used[block] = self._clock()

    def overwritten(self, block: int) -> None:
        """Its content is given up."""
        if block % SAMPLED == 0 and block in self._born:
            now = self._clock()
            self.lifetimes.append(now - self._born.pop(block))
            self.idle.append(now - self._used.pop(block))

    def take(self) -> list[list[float]]:
        """[lifetimes, idle, reuse_gaps] since the last call; empty when there is nothing to tell."""
        if not self.lifetimes and not self.reuse_gaps:
            return []
        taken = [self.lifetimes, self.idle, self.reuse_gaps]
        self.lifetimes, self.idle, self.reuse_gaps = [], [], []
        return taken
