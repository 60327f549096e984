"""The line that moves while a run goes on. On stderr, and only where that is a terminal."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from toolkit.bench.client import Counts
from toolkit.config.clients import BenchConfig

REFRESH = 0.25  # seconds; drawing takes about a millisecond of the event loop


async def show_progress(
    config: BenchConfig, counts: Callable[[], Counts], clock: Callable[[], float]
) -> None:
    """Draws until cancelled, then clears what it drew."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        before, pieces = clock(), counts().pieces
        while True:
            await asyncio.sleep(REFRESH)
            now, found = clock(), counts()
            rate = (found.pieces - pieces) / max(now - before, 1e-9)
            before, pieces = now, found.pieces
            live.update(progress_line(found, config, now, rate), refresh=True)


def progress_line(counts: Counts, config: BenchConfig, now: float, rate: float) -> str:
    """`rate` is pieces of answers per second; for most servers a piece is a token."""
    of = f"/{config.count:,}" if config.count is not None else ""
    failed = f", [red]{counts.failed:,} failed[/red]" if counts.failed else ""
    return (
        f"{max(0.0, now):6.1f} s  sent {counts.sent:,}{of}, running {counts.running:,}, "
        f"done {counts.done:,}{failed}  {rate:,.0f} chunks/s"
    )
