"""`tk models`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("models", cls=Command)
def models(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FOLDER", help="Where to look for model folders. Default: the current folder."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the models at hand.

    The demo model, folders, and what was downloaded from the hub.
    FITS says whether this machine has room for the weights and one request of the model's full context.
    """
    from toolkit.inventory.listing import list_models

    list_models(folders or [Path()], as_json=json)
