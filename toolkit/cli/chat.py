"""`tk chat`."""

from __future__ import annotations

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import ChatConfig


@command(app, "chat", ChatConfig)
def chat(config: ChatConfig) -> None:
    """Talk to a model. With a PROMPT, or what comes through a pipe, answer once: only the answer goes to stdout."""
    from toolkit.chat.run import run

    raise typer.Exit(run(config))
