"""`tk chat`."""

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import ChatConfig


@command(app, "chat", ChatConfig)
def chat(config: ChatConfig) -> None:
    """Chat with a model in the terminal.

    With a PROMPT or piped text it answers once, and only the answer goes to stdout."""
    from toolkit.chat.run import run

    raise typer.Exit(run(config))
