"""`tk top`: the screen, or one snapshot where there is no screen."""

from __future__ import annotations

import asyncio
import sys

from toolkit.config.clients import TopConfig
from toolkit.top.history import History
from toolkit.top.plain import snapshot
from toolkit.top.source import Source


def run(config: TopConfig) -> int:
    """Shows until the user quits; the exit code of the command."""
    if config.once or not (sys.stdout.isatty() and sys.stderr.isatty()):  # Textual draws on stderr
        print(asyncio.run(look_once(config)), end="")
        return 0
    from toolkit.top.app import TopApp

    source = Source(config.url, config.api_key)
    TopApp(source, interval=config.interval, window=config.window).run()
    return 0


async def look_once(config: TopConfig) -> str:
    """Two readings, `interval` seconds apart, as text: rates between them, latencies since the start.

    Raises ServerError when there is no server to look at.
    """
    source = Source(config.url, config.api_key)
    try:
        history = History(config.window)
        history.add(await source.scrape())
        identity = await source.identity()
        await asyncio.sleep(config.interval)
        history.add(await source.scrape())
    finally:
        await source.close()
    return snapshot(config.url, identity, history.view(since_start=True))
