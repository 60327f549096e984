"""Locations of man pages and completion scripts: in the checkout, or in the installed package."""

import os
from pathlib import Path
from typing import Literal

from toolkit.errors import ToolkitError

Shell = Literal["bash", "zsh", "fish"]
COMPLETIONS = {"bash": "tk.bash", "zsh": "_tk", "fish": "tk.fish"}
CHECKOUT = Path(__file__).parents[2]


def shipped(folder: str, name: str) -> Path:
    """Return a file of `man/` or `completions/`. Raises ToolkitError if it is not installed."""
    path = CHECKOUT / folder / name
    if path.is_file() and (CHECKOUT / "pyproject.toml").is_file():
        return path
    from importlib import metadata  # slower to import than all of the command line's modules

    for file in metadata.files("tk-llm") or []:
        if file.name == name and "share" in file.parts:
            return Path(str(file.locate()))
    raise ToolkitError(
        f"This installation of tk has no {name}. Install the wheel: pip install tk-llm."
    )


def completion_path(shell: Shell) -> Path:
    """Return the file in which a shell looks for the user's completions of tk."""
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
