"""Where tk keeps what outlives one run: the history of questions, the log of a private server."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """`$XDG_STATE_HOME/tk`, else `~/.local/state/tk`; made when it is missing, for its owner's eyes only."""
    base = os.environ.get("XDG_STATE_HOME")
    folder = (Path(base) if base else Path.home() / ".local" / "state") / "tk"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_file(path: Path) -> Path:
    """The path, of an existing file that only its owner can read."""
    path.touch(mode=0o600, exist_ok=True)
    return path
