"""`tk pull`."""

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app


@app.command("pull", cls=Command)
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="HUB_NAME",
            help="The model, such as Qwen/Qwen3-0.6B, or org/model:Q4_K_M for one GGUF file.",
        ),
    ],
    revision: Annotated[
        str | None, typer.Option(metavar="REVISION", help="Branch, tag or commit on the hub.")
    ] = None,
) -> None:
    """Download a model from the hub.

    Afterwards it can be served without the hub. An interrupted download is resumed, and complete
    files are not downloaded again. The model's folder is printed to stdout."""
    from toolkit.inventory.download import pull as run

    print(run(name, revision))
