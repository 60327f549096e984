"""`tk transcribe`."""

import typer

from toolkit.cli.command import command
from toolkit.cli.root import app
from toolkit.config.clients import TranscribeConfig


@command(app, "transcribe", TranscribeConfig)
def transcribe(config: TranscribeConfig) -> None:
    """Transcribe sound files, or translate them into English.

    Text goes to stdout, or to a file for each with --output. A server that runs on this machine
    transcribes, else a private one that ends with the command. If a file fails, the others are
    still transcribed, and the exit code is 1."""
    from toolkit.transcribe.run import run

    raise typer.Exit(run(config))
