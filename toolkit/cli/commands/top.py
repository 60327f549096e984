"""`tk top`."""

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import TopConfig


@command(app, "top", TopConfig)
def top(config: TopConfig) -> None:
    """Watch running servers: throughput, latency, live requests and bottlenecks.

    Five pages: 1 overview, 2 live requests (sort, filter, open, end), 3 latency over time as
    heatmaps, 4 servers, 5 settings. ? lists the keys. Reads /metrics of tk and vLLM servers, and
    /tk/requests and /server_info of tk servers, which need the admin key if the server has one."""
    from toolkit.top.run import run

    raise typer.Exit(run(config))
