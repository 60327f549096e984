"""`tk top`."""

from __future__ import annotations

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import TopConfig


@command(app, "top", TopConfig)
def top(config: TopConfig) -> None:
    """Watch a running server: throughput, queue, KV cache, latency."""
    from toolkit.top.run import run

    raise typer.Exit(run(config))
