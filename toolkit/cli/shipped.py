"""Where the man pages and completion scripts are: in the checkout, or where the package was installed with them."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ToolkitError

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
    raise ToolkitError(f"This installation of tk came without {name}. Install the wheel: pip install tk-llm.")
