"""Folders for the files of tk chat."""

import os
from pathlib import Path


def state_folder() -> Path:
    """Return the folder of the question history and the log: `~/.local/state/tk` by default."""
    return _make_folder("XDG_STATE_HOME", ".local/state", "tk")


def data_folder() -> Path:
    """Return the folder of conversations: `~/.local/share/tk/chats` by default."""
    return _make_folder("XDG_DATA_HOME", ".local/share", "tk/chats")


def _make_folder(variable: str, default: str, name: str) -> Path:
    """Make the folder, readable only by its owner, if it does not exist."""
    base = os.environ.get(variable)
    folder = (Path(base) if base else Path.home() / default) / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def private_file(path: Path) -> Path:
    """Create the file, readable only by its owner, if it does not exist. Return its path."""
    path.touch(mode=0o600, exist_ok=True)
    return path
