"""The line that moves while a run goes on. On stderr, and only where that is a terminal."""

from __future__ import annotations

import asyncio
import sys

from toolkit.bench.client import Client
from toolkit.config.clients import BenchConfig

REFRESH = 0.25  # seconds; drawing takes about a millisecond of the event loop


async def show_progress(client: Client, config: BenchConfig) -> None:
    """Draws until cancelled, then clears what it drew."""
    if not sys.stderr.isatty():
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        before, pieces = client.clock(), client.num_pieces
        while True:
            await asyncio.sleep(REFRESH)
            now = client.clock()
            rate = (client.num_pieces - pieces) / (now - before)
            before, pieces = now, client.num_pieces
            live.update(progress_line(client, config, now, rate), refresh=True)


def progress_line(client: Client, config: BenchConfig, now: float, rate: float) -> str:
    """`rate` is pieces of answers per second; for most servers a piece is a token."""
    of = f"/{config.count:,}" if config.count is not None else ""
    failed = f", [red]{client.num_failed:,} failed[/red]" if client.num_failed else ""
    return (
        f"{now:6.1f} s  sent {client.num_sent:,}{of}, running {client.num_running:,}, "
        f"done {client.num_done:,}{failed}  {rate:,.0f} chunks/s"
    )
