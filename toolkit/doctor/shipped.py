"""Where the man pages and completion scripts are: in the checkout, or where the package was installed with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from toolkit.errors import ToolkitError

Shell = Literal["bash", "zsh", "fish"]
COMPLETIONS = {"bash": "tk.bash", "zsh": "_tk", "fish": "tk.fish"}
CHECKOUT = Path(__file__).parents[2]


def shipped(folder: str, name: str) -> Path:
    """A file of `man/` or `completions/`. Raises ToolkitError when this installation lacks it."""
    here = CHECKOUT / folder / name
    if here.is_file() and (CHECKOUT / "pyproject.toml").is_file():
        return here
    from importlib import metadata  # takes longer than all of the command line's own modules

    for file in metadata.files("tk-llm") or []:
        if file.name == name and "share" in file.parts:
            return Path(str(file.locate()))
    raise ToolkitError(
        f"This installation of tk came without {name}. Install the wheel: pip install tk-llm."
    )


def completion_path(shell: Shell) -> Path:
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
