"""`tk completion`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.cli.shipped import shipped

Shell = Literal["bash", "zsh", "fish"]
FILES = {"bash": "tk.bash", "zsh": "_tk", "fish": "tk.fish"}


@app.command("completion", cls=Command)
def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="The shell to complete in.")],
    install: Annotated[
        bool, typer.Option("--install", help="Write it where the shell finds it, instead of to stdout.")
    ] = False,
) -> None:
    """Print the completion script of a shell, or install it."""
    script = shipped("completions", FILES[shell]).read_text()
    if not install:
        print(script, end="")
        return
    path = install_path(shell)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(script)
    print(f"Wrote {path}. It works in new shells.")
    if shell == "zsh":
        print(
            f"~/.zshrc needs, before compinit runs: fpath=({path.parent} $fpath); autoload -U compinit && compinit"
        )
    if shell == "bash":
        print(f"Without the package bash-completion, ~/.bashrc needs: source {path}")


def install_path(shell: Shell) -> Path:
    """Where a shell looks for a user's completions."""
    home = Path.home()
    if shell == "bash":
        data = Path(os.environ.get("XDG_DATA_HOME") or home / ".local" / "share")
        return (
            Path(os.environ.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion")
            / "completions"
            / "tk"
        )
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
        return config / "fish" / "completions" / "tk.fish"
    return Path(os.environ.get("ZDOTDIR") or home) / ".zfunc" / "_tk"
