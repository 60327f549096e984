"""`tk rm`."""

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("rm", cls=Command)
def rm(
    names: Annotated[
        list[str], typer.Argument(metavar="DOWNLOADED", help="Models listed by tk models.")
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
) -> None:
    """Remove downloaded models.

    Asks first, then removes all their revisions from the hub's cache, and nothing else."""
    from toolkit.inventory.removal import remove

    raise typer.Exit(remove(names, yes=yes))
