"""Generate man pages and completion scripts from the settings and commands: `make docs`."""

from __future__ import annotations

from tools.docs.completions import bash, fish, zsh
from tools.docs.pages import pages
from tools.docs.tree import program


def generate() -> dict[str, str]:
    """Return the text of each generated file, by its path in the repository."""
    tk = program()
    manual = {f"man/{name}": text for name, text in pages(tk).items()}
    return manual | {
        "completions/tk.bash": bash(tk),
        "completions/_tk": zsh(tk),
        "completions/tk.fish": fish(tk),
    }
