"""Live display of a run, on stderr if that is a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from typing import TYPE_CHECKING

from toolkit.bench.load.answer_stream import LiveCounts
from toolkit.config.load import BenchConfig

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_INTERVAL = 0.25  # seconds; drawing takes about a millisecond of the event loop
BARS = "▁▂▃▄▅▆▇█"
HISTORY = 44  # columns of the sparkline, one per half second
SAMPLES_PER_COLUMN = 2


class ProgressDisplay:
    """Recent samples of a run's counts."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.rates: deque[float] = deque(maxlen=HISTORY)
        self._samples: deque[tuple[float, LiveCounts]] = deque(maxlen=SAMPLES_PER_COLUMN * 2 + 1)
        self._num_samples = 0

    def add_sample(self, now: float, counts: LiveCounts) -> None:
        """Record the counts `now` seconds after the start."""
        self._samples.append((now, copy(counts)))
        self._num_samples += 1
        if self._num_samples % SAMPLES_PER_COLUMN == 0:
            self.rates.append(self._rate("tokens"))

    def _rate(self, name: str) -> float:
        """Return the current growth of a count per second."""
        (first, before), (last, after) = self._samples[0], self._samples[-1]
        return float(getattr(after, name) - getattr(before, name)) / max(last - first, 1e-9)

    def lines(self) -> Group:
        """Return three lines: progress, rates, and the history of the token rate."""
        from rich.console import Group
        from rich.text import Text

        now, counts = self._samples[-1]
        total = f"/{self.config.max_requests:,}" if self.config.max_requests is not None else ""
        until = f"/{self.config.duration:g}" if self.config.duration is not None else ""
        first = Text(
            f"{max(0.0, now):6.1f}{until} s  ", style="bold", no_wrap=True, overflow="ellipsis"
        )
        first.append(
            f"sent {counts.sent:,}{total}, running {counts.running:,}, done {counts.done:,}",
            "not bold",
        )
        if counts.failed:
            first.append(f", {counts.failed:,} failed ({counts.error})", "red not bold")
        second = Text(no_wrap=True, overflow="ellipsis")
        second.append(
            f"          {self._rate('sent'):,.1f} sent/s, {self._rate('done'):,.1f} done/s, "
            f"{self._rate('tokens'):,.0f} tok/s{self._ttft()}"
        )
        third = Text(no_wrap=True, overflow="ellipsis")
        third.append("          ").append(sparkline(self.rates), "cyan").append(" tok/s", "dim")
        return Group(first, second, third)

    def _ttft(self) -> str:
        """Return the mean TTFT since the oldest sample."""
        (_, before), (_, after) = self._samples[0], self._samples[-1]
        count = after.first_tokens - before.first_tokens
        return f", TTFT {(after.ttft - before.ttft) / count * 1e3:,.1f} ms" if count else ""


def sparkline(values: deque[float]) -> str:
    """Return one character per value, scaled to the highest."""
    top = max(values, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


@asynccontextmanager
async def showing_progress(
    config: BenchConfig, counts: Callable[[], LiveCounts], clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Draw while the block runs, then clear the display."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    drawing = asyncio.create_task(_draw(ProgressDisplay(config), counts, clock))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


async def _draw(
    progress: ProgressDisplay, counts: Callable[[], LiveCounts], clock: Callable[[], float]
) -> None:
    from rich.live import Live

    from toolkit.console import SafeConsole

    with Live(console=SafeConsole(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            progress.add_sample(clock(), counts())
            live.update(progress.lines(), refresh=True)
            await asyncio.sleep(REFRESH_INTERVAL)
