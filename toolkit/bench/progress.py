"""The lines that move while a run goes on. On stderr, and only where that is a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from copy import copy
from typing import TYPE_CHECKING

from toolkit.bench.load.answer_stream import Counts
from toolkit.config.load import BenchConfig

if TYPE_CHECKING:
    from rich.console import Group

REFRESH = 0.25  # seconds; drawing takes about a millisecond of the event loop
BARS = "▁▂▃▄▅▆▇█"
HISTORY = 44
"""Columns of the sparkline, one for each half second."""
LOOKS_PER_COLUMN = 2


class Progress:
    """What the display remembers of a run."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.rates: deque[float] = deque(maxlen=HISTORY)
        self._looks: deque[tuple[float, Counts]] = deque(maxlen=LOOKS_PER_COLUMN * 2 + 1)
        self._number = 0

    def look(self, now: float, counts: Counts) -> None:
        """Takes in where the run is, `now` seconds after its beginning."""
        self._looks.append((now, copy(counts)))
        self._number += 1
        if self._number % LOOKS_PER_COLUMN == 0:
            self.rates.append(self._rate("tokens"))

    def _rate(self, name: str) -> float:
        """How fast a count grows now, per second."""
        (first, before), (last, after) = self._looks[0], self._looks[-1]
        return float(getattr(after, name) - getattr(before, name)) / max(last - first, 1e-9)

    def lines(self) -> Group:
        """Three lines: how far, how fast, how it has been."""
        from rich.console import Group
        from rich.text import Text

        now, counts = self._looks[-1]
        of = f"/{self.config.count:,}" if self.config.count is not None else ""
        until = f"/{self.config.duration:g}" if self.config.duration is not None else ""
        first = Text(
            f"{max(0.0, now):6.1f}{until} s  ", style="bold", no_wrap=True, overflow="ellipsis"
        )
        first.append(
            f"sent {counts.sent:,}{of}, running {counts.running:,}, done {counts.done:,}",
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
        """The mean of what came since the oldest look."""
        (_, before), (_, after) = self._looks[0], self._looks[-1]
        count = after.first_tokens - before.first_tokens
        return f", TTFT {(after.ttft - before.ttft) / count * 1e3:,.1f} ms" if count else ""


def sparkline(values: deque[float]) -> str:
    """One character for each value, as high as it is beside the highest."""
    top = max(values, default=0.0) or 1.0
    return "".join(BARS[min(len(BARS) - 1, int(value / top * len(BARS)))] for value in values)


@asynccontextmanager
async def showing_progress(
    config: BenchConfig, counts: Callable[[], Counts], clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Draws for as long as the block runs, then clears what it drew."""
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield
        return
    drawing = asyncio.create_task(_draw(Progress(config), counts, clock))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)


async def _draw(
    progress: Progress, counts: Callable[[], Counts], clock: Callable[[], float]
) -> None:
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        while True:
            progress.look(clock(), counts())
            live.update(progress.lines(), refresh=True)
            await asyncio.sleep(REFRESH)
