"""`tk pull`."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("pull", cls=Command)
def pull(
    name: Annotated[
        str, typer.Argument(metavar="HUB_NAME", help="The model, such as Qwen/Qwen3-0.6B.")
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit on the hub.")
    ] = None,
) -> None:
    """Fetch a model from the hub.

    It can be served without the hub then.
    A connection that breaks is gone on with, and files that an earlier
    attempt has fetched are not fetched again. The folder that the model is in goes to stdout.
    """
    from toolkit.inventory.download import pull as run

    print(run(name, revision))
