"""Progress of the ranks, from their heartbeats."""

import time
from collections.abc import Iterable

from toolkit.executor.rank_messages import Heartbeat

HEARTBEAT_INTERVAL = 0.5  # seconds between heartbeats of a busy rank
SILENCE = 4 * HEARTBEAT_INTERVAL  # seconds without a heartbeat after which a rank counts as silent


class Progress:
    """Steps that each rank has reported, and the time of its last heartbeat."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._steps = dict.fromkeys(ranks, 0)
        self._received = dict.fromkeys(self._steps, 0.0)

    def note(self, beat: Heartbeat) -> None:
        self._steps[beat.rank], self._received[beat.rank] = beat.steps, time.monotonic()

    def behind(self, steps: int) -> list[int]:
        """Return the ranks that hold up `steps`: silent ones, else those with the fewest steps."""
        late = [rank for rank, done in self._steps.items() if done < steps]
        now = time.monotonic()
        silent = [rank for rank in late if now - self._received[rank] > SILENCE]
        least = min(self._steps.values())
        return silent or [rank for rank in late if self._steps[rank] == least]
