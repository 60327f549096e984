"""Lifetimes of cached blocks, measured on a sample of them."""

import time
from collections.abc import Callable

SAMPLED = 64  # one block in 64 is watched, so that the cost does not show


class BlockWatch:
    """Times in the lives of some blocks, from allocation to the eviction of their content."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._born: dict[int, float] = {}
        self._used: dict[int, float] = {}
        self.lifetimes: list[float] = []
        """Seconds from allocation to eviction. All lists are of lives that ended since `take`."""
        self.idle: list[float] = []  # seconds from the last use to eviction
        self.reuse_gaps: list[float] = []  # seconds between two uses by requests

    def on_allocate(self, block: int) -> None:
        """Note that a block was allocated."""
        if block % SAMPLED == 0:
            self._born[block] = self._used[block] = self._clock()

    def on_share(self, block: int) -> None:
        """Note that another request found the block's content."""
        if block % SAMPLED == 0 and block in self._used:
            now = self._clock()
            self.reuse_gaps.append(now - self._used[block])
            self._used[block] = now

    def on_release(self, block: int) -> None:
        """Note that a request released the block."""
        if block % SAMPLED == 0 and block in self._used:
            self._used[block] = self._clock()

    def on_evict(self, block: int) -> None:
        """Note that the block's content was evicted."""
        if block % SAMPLED == 0 and block in self._born:
            now = self._clock()
            self.lifetimes.append(now - self._born.pop(block))
            self.idle.append(now - self._used.pop(block))

    def take(self) -> list[list[float]]:
        """Return [lifetimes, idle, reuse_gaps] since the last call, or [] if there are none."""
        if not self.lifetimes and not self.reuse_gaps:
            return []
        taken = [self.lifetimes, self.idle, self.reuse_gaps]
        self.lifetimes, self.idle, self.reuse_gaps = [], [], []
        return taken
