"""Progress of reading weights, in the log: large models take a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from toolkit.units import size

logger = logging.getLogger(__name__)

INTERVAL = 3.0  # seconds between lines; what takes less has none
WIDTH = 20  # characters of the bar


class Progress:
    """Logs a bar with bytes, rate and time left, every INTERVAL seconds."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: bytes to read."""
        self._total, self._clock = total, clock
        self._done, self._start = 0, clock()
        self._next = self._start + INTERVAL
        self._has_shown = False

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self._done += num_bytes
        now, is_done = self._clock(), self._done >= self._total
        if now >= self._next or (is_done and self._has_shown):
            self._next, self._has_shown = now + INTERVAL, True
            self._show(now - self._start)

    def _show(self, seconds: float) -> None:
        share, rate = self._done / max(self._total, 1), self._done / seconds
        filled = int(share * WIDTH)
        left = (self._total - self._done) / max(rate, 1)
        logger.info(
            "weights [%s%s] %s of %s, %s/s, %s",
            "#" * filled,
            "-" * (WIDTH - filled),
            f"{share:.0%}",
            size(self._total),
            size(rate),
            f"{left:.0f} s left" if left else f"{seconds:.0f} s",
        )
