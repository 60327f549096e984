"""Copying to the clipboard, by a desktop program if there is one, else by the terminal."""

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
)  # (environment variable that must be set, command that reads the text from stdin)
TIMEOUT = 5.0  # seconds


def copy(text: str, terminal: Terminal) -> str:
    """Copy the text and return a message that says how. Raises InvalidRequestError."""
    for variable, command in PROGRAMS:
        if os.environ.get(variable) and shutil.which(command[0]) and _run(command, text):
            return f"Copied {len(text):,} characters ({command[0]})."
    if not terminal.is_live:
        raise InvalidRequestError("No clipboard: found neither a clipboard program nor a terminal.")
    encoded = base64.b64encode(text.encode()).decode()
    terminal.out.write(f"\x1b]52;c;{encoded}\x07")  # OSC 52, which works over SSH
    terminal.out.flush()
    return (
        f"Sent {len(text):,} characters to the terminal's clipboard (OSC 52). "
        "The terminal may have to allow it."
    )


def _run(command: tuple[str, ...], text: str) -> bool:
    try:
        done = subprocess.run(
            command,
            input=text.encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
