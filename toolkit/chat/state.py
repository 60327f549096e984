"""Where tk chat keeps what outlives one run."""

from __future__ import annotations

import os
from pathlib import Path


def state_folder() -> Path:
    """Of questions asked before and the log of a private server: `$XDG_STATE_HOME/tk`, else `~/.local/state/tk`."""
    return _folder("XDG_STATE_HOME", ".local/state", "tk")


def data_folder() -> Path:
    """Of conversations: `$XDG_DATA_HOME/tk/chats`, else `~/.local/share/tk/chats`."""
    return _folder("XDG_DATA_HOME", ".local/share", "tk/chats")


def _folder(variable: str, usual: str, name: str) -> Path:
    """Made when it is missing, for its owner's eyes only."""
    base = os.environ.get(variable)
    folder = (Path(base) if base else Path.home() / usual) / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_file(path: Path) -> Path:
    """The path, of an existing file that only its owner can read."""
    path.touch(mode=0o600, exist_ok=True)
    return path
