"""Whether the terminal's background is light, which only the terminal knows."""

from __future__ import annotations

import os
import re
import select
import sys
import time

PATIENCE = 1.0
"""Seconds that a terminal has to answer."""
ASK = b"\x1b]11;?\x1b\\\x1b[c"
"""What color the background has; and then what the terminal is, which all answer, so that nobody waits in vain."""


def is_light() -> bool:
    """By the terminal's own answer, else by COLORFGBG, which some set; dark when neither tells."""
    answer = _ask()
    found = re.search(rb"rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)", answer)
    if found:
        red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
        return bool(0.299 * red + 0.587 * green + 0.114 * blue > 0.5)
    last = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return last in ("7", "15")


def _ask() -> bytes:
    """The terminal's answers, or nothing where it cannot be asked."""
    try:
        import termios
        import tty
    except ImportError:
        return b""
    descriptor = sys.stdin.fileno()
    try:
        before = termios.tcgetattr(descriptor)
    except termios.error:
        return b""
    answer = b""
    try:
        tty.setcbreak(descriptor)
        os.write(sys.stdout.fileno(), ASK)
        until = time.monotonic() + PATIENCE
        while not re.search(rb"\x1b\[\?[\d;]*c", answer) and (left := until - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left)[0]:
                break
            answer += os.read(descriptor, 256)
    except OSError:
        return answer
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
    return answer
