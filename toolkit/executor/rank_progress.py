"""What is known of the ranks' steps."""

from __future__ import annotations

import time
from collections.abc import Iterable

from toolkit.executor.rank_messages import Beat

BEAT = 0.5
"""Seconds between a rank's signs of life while it has something to do."""
SILENT = 4 * BEAT
"""Seconds after which no sign is a sign."""


class Progress:
    """How many steps each rank has told to have done, and when it was last heard."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._steps = dict.fromkeys(ranks, 0)
        self._heard = dict.fromkeys(self._steps, 0.0)

    def note(self, beat: Beat) -> None:
        self._steps[beat.rank], self._heard[beat.rank] = beat.steps, time.monotonic()

    def behind(self, steps: int) -> list[int]:
        """The ranks that keep the others from having done so many steps: those that are silent, else those that have done the fewest."""
        late = [rank for rank, done in self._steps.items() if done < steps]
        now = time.monotonic()
        silent = [rank for rank in late if now - self._heard[rank] > SILENT]
        least = min(self._steps.values())
        return silent or [rank for rank in late if self._steps[rank] == least]
