"""`tk completion`."""

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.doctor.shipped import COMPLETIONS, Shell, completion_path, shipped


@app.command("completion", cls=Command)
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="The shell.")],
    install: Annotated[
        bool,
        typer.Option("--install", help="Install the script instead of printing it."),
    ] = False,
) -> None:
    """Print or install the completion script of a shell."""
    script = shipped("completions", COMPLETIONS[shell]).read_text()
    if not install:
        print(script, end="")
        return
    path = completion_path(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    print(f"Wrote {path}. Completion works in new shells.")
    if shell == "zsh":
        print(
            f"Add to ~/.zshrc, before compinit runs: fpath=({path.parent} $fpath); "
            "autoload -U compinit && compinit"
        )
    if shell == "bash":
        print(f"If bash-completion is not installed, add to ~/.bashrc: source {path}")
