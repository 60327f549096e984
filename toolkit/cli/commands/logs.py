"""`tk logs`."""

import sys
import time
from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.errors import ConfigError
from toolkit.running import choose

POLL = 0.2  # seconds


@app.command("logs", cls=Command)
def logs(
    server: Annotated[
        str | None,
        typer.Argument(
            metavar="SERVER",
            help="Name of the server's model, its port or process. Not needed if only one runs.",
        ),
    ] = None,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Wait for more lines, until the server ends."),
    ] = False,
) -> None:
    """Print the log of a running server.

    It has one if tk serve --detach started it, or if its stderr is a file. A server in a terminal
    logs there."""
    found = choose(server, "logs")
    if found.log is None:
        raise ConfigError(
            f"{found.title} has no log file: it logs to the terminal or the program that started "
            "it. 'tk serve --detach' starts a server with a log file."
        )
    try:
        with open(found.log, "rb") as file:
            while True:
                is_running = found.is_running
                sys.stdout.buffer.write(file.read())
                sys.stdout.flush()
                if not follow or not is_running:
                    return
                time.sleep(POLL)
    except BrokenPipeError:  # its reader has ended; the flush at exit finds it, too
        return
    except OSError as error:
        raise ConfigError(f"The log {found.log} cannot be read: {error.strerror}.") from None
