"""`tk show`."""

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("show", cls=Command)
def show(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Model folder, GGUF file, or hub name (org/model or org/model:Q4_K_M). "
            "Default: the demo model.",
        ),
    ] = None,
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit on the hub.")
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Print what the layers compute, line by line.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, config.json included.")] = False,
) -> None:
    """Show the properties of a model.

    Architecture, parameters, context, tokenizer, chat template, license and files. If the model is
    only on the hub, its description is downloaded, but not its weights."""
    from toolkit.inventory.card import show as run

    run(model, revision, layers=layers, as_json=json)
