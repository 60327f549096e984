"""The clipboard: through a program of the desktop where there is one, else through the terminal."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess

from toolkit.chat.screen.terminal import Terminal
from toolkit.errors import InvalidRequestError

PROGRAMS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--clipboard", "--input")),
    ("TMUX", ("tmux", "load-buffer", "-w", "-")),  # -w: to the terminal's clipboard, too
    ("HOME", ("pbcopy",)),
)
"""(variable that must be set, command that takes the text on its standard input)"""
PATIENCE = 5.0  # seconds


def copy(text: str, terminal: Terminal) -> str:
    """Copies a text, and says how. Raises InvalidRequestError when there is no way."""
    for variable, command in PROGRAMS:
        if os.environ.get(variable) and shutil.which(command[0]) and _feed(command, text):
            return f"Copied {len(text):,} characters ({command[0]})."
    if not terminal.is_live:
        raise InvalidRequestError("There is no clipboard: neither a program for it nor a terminal.")
    terminal.out.write(
        f"\x1b]52;c;{base64.b64encode(text.encode()).decode()}\x07"
    )  # OSC 52, which works over SSH
    terminal.out.flush()
    return f"Sent {len(text):,} characters to the terminal's clipboard, if it lets programs write there (OSC 52)."


def _feed(command: tuple[str, ...], text: str) -> bool:
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=PATIENCE,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
