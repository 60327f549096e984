"""Makes the man pages and completion scripts of the table of settings and the tree of commands: `make docs`."""

from __future__ import annotations

from tools.docs.completions import bash, fish, zsh
from tools.docs.pages import pages
from tools.docs.tree import program


def everything() -> dict[str, str]:
    """The text of each file that is made, by its path in the repository."""
    tk = program()
    made = {f"man/{name}": text for name, text in pages(tk).items()}
    return made | {
        "completions/tk.bash": bash(tk),
        "completions/_tk": zsh(tk),
        "completions/tk.fish": fish(tk),
    }
