"""`tk models`."""

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
            metavar="FOLDER", help="Folders to search for models. Default: the current folder."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List local models.

    The demo model, model folders, and downloads from the hub. FITS: whether this machine has memory
    for the weights and one request of full context length."""
    from toolkit.inventory.listing import list_models

    list_models(folders or [Path()], as_json=json)
