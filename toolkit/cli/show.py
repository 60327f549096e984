"""`tk show`."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("show", cls=Command)
def show(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="A folder or a hub name. Without one: the demo model."
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit on the hub.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, config.json included.")] = False,
) -> None:
    """Show what a model is: architecture, parameters, context, tokenizer, chat template, license, files.

    Of a model that is on the hub alone only the description is fetched, not the weights.
    """
    from toolkit.inventory.card import show as run

    run(model, revision, as_json=json)
