"""`tk top`."""

from __future__ import annotations

import typer

from toolkit.cli import app
from toolkit.cli.command import command
from toolkit.config.clients import TopConfig


@command(app, "top", TopConfig)
def top(config: TopConfig) -> None:
    """Watch a running server: throughput, requests, KV cache and latency."""
    from toolkit.top.run import run

    raise typer.Exit(run(config))
