"""Progress of reading weights, on the terminal or in the log: large models take a minute."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from toolkit.logs import PROGRESS
from toolkit.units import size

logger = logging.getLogger(__name__)

INTERVAL = 3.0  # seconds between lines; what takes less has none
FRAME = 0.2  # seconds between two texts where they replace each other
WIDTH = 20  # characters of the bar


class Progress:
    """Shows a bar with bytes, rate and time left: on a terminal in place, else in the log."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`total`: bytes to read."""
        self._total, self._clock = total, clock
        self._done, self._start = 0, clock()
        self._is_live = PROGRESS.isEnabledFor(logging.INFO)
        self._next = self._start + (FRAME if self._is_live else INTERVAL)
        self._has_shown = False

    def add(self, num_bytes: int) -> None:
        """Count bytes that were read."""
        self._done += num_bytes
        now, is_done = self._clock(), self._done >= self._total
        if self._is_live and is_done:
            PROGRESS.info("")
        elif now >= self._next or (is_done and self._has_shown):
            self._next, self._has_shown = now + (FRAME if self._is_live else INTERVAL), True
            self._show(now - self._start)

    def _show(self, seconds: float) -> None:
        share, rate = self._done / max(self._total, 1), self._done / seconds
        filled = int(share * WIDTH)
        left = (self._total - self._done) / max(rate, 1)
        (PROGRESS if self._is_live else logger).info(
            "weights [%s%s] %s of %s, %s/s, %s",
            "#" * filled,
            "-" * (WIDTH - filled),
            f"{share:.0%}",
            size(self._total),
            size(rate),
            f"{left:.0f} s left" if left else f"{seconds:.0f} s",
        )
