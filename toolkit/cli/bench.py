"""`tk bench`."""

from __future__ import annotations

import typer

from toolkit.cli import app
from toolkit.cli.command import command
from toolkit.config.clients import BenchConfig


@command(app, "bench", BenchConfig)
def bench(config: BenchConfig) -> None:
    """Load a running server and report its latency and throughput.

    Exits with 1 when no request succeeded or when this program, not the server, was the bottleneck.
    """
    from toolkit.bench.run import run

    raise typer.Exit(run(config))
