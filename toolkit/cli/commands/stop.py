"""`tk stop`."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.errors import ConfigError
from toolkit.logs import escape_line
from toolkit.running import RunningServer, choose, running_servers

POLL = 0.05  # seconds
PATIENCE = 1.0  # seconds until a line says what is waited for


@app.command("stop", cls=Command)
def stop(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="SERVER",
            help="Name of the server's model, its port or process. Not needed if only one runs.",
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Stop all your servers.")] = False,
) -> None:
    """Stop a running server.

    Like Ctrl-C: the server refuses new requests, finishes the running ones within its
    --shutdown-timeout, and ends. tk stop waits for that. A second tk stop ends running requests at
    once."""
    if every and server is not None:
        raise ConfigError(f"--all stops every server; leave out {server!r}.", param="all")
    servers = running_servers() if every else [choose(server, "stop")]
    if not servers:
        print("No server of yours runs on this machine.")
    _stop(servers)


def _stop(servers: Sequence[RunningServer]) -> None:
    """Ask the servers to end, and print a line for each that has ended."""
    started = time.monotonic()
    for server in servers:
        with suppress(ProcessLookupError):  # it has just ended
            if server.is_running:
                os.kill(server.pid, signal.SIGTERM)
    waiting, has_waited = list(servers), False
    while waiting:
        for server in [one for one in waiting if not one.is_running]:
            seconds = time.monotonic() - started
            print(escape_line(f"Stopped {server.title} in {seconds:.1f} s."), flush=True)
            waiting.remove(server)
        if waiting and not has_waited and time.monotonic() - started > PATIENCE:
            has_waited = True
            for server in waiting:
                text = f"{server.title} finishes its requests; another 'tk stop' ends them at once."
                print(escape_line(text), file=sys.stderr)
        time.sleep(POLL if waiting else 0.0)
