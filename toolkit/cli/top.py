"""`tk top`."""

from __future__ import annotations

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import TopConfig


@command(app, "top", TopConfig)
def top(config: TopConfig) -> None:
    """Watch running servers: throughput, latency, live requests, and why they are not faster.

    Five pages: 1 overview, 2 live requests (sorted, filtered, opened, ended), 3 latency over time as heatmaps, 4 servers, 5
    settings. ? lists the keys. It reads /metrics of tk and vLLM servers, and of tk servers /tk/requests and
    /server_info, which want the operator's key where there is one.
    """
    from toolkit.top.run import run

    raise typer.Exit(run(config))
