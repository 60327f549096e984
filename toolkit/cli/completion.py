"""`tk completion`."""

from __future__ import annotations

from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.doctor.shipped import COMPLETIONS, Shell, completion_path, shipped


@app.command("completion", cls=Command)
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="The shell to complete in.")],
    install: Annotated[
        bool,
        typer.Option("--install", help="Write it where the shell finds it, instead of to stdout."),
    ] = False,
) -> None:
    """Print the completion script of a shell, or install it."""
    script = shipped("completions", COMPLETIONS[shell]).read_text()
    if not install:
        print(script, end="")
        return
    path = completion_path(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    print(f"Wrote {path}. It works in new shells.")
    if shell == "zsh":
        print(
            f"~/.zshrc needs, before compinit runs: fpath=({path.parent} $fpath); autoload -U compinit && compinit"
        )
    if shell == "bash":
        print(f"Without the package bash-completion, ~/.bashrc needs: source {path}")
