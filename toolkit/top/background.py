"""Detection of a light terminal background, by a query to the terminal."""

import os
import re
import select
import sys
import time

TIMEOUT = 1.0  # seconds for the terminal's answer
QUERY = b"\x1b]11;?\x1b\\\x1b[c"
"""Asks for the background color, then for the terminal's type.

All terminals answer the second query, so those without the first one cause no timeout."""
TYPE = re.compile(rb"\x1b\[\?[\d;]*c")  # answer to the second query


def is_light() -> bool:
    """Ask the terminal, else read COLORFGBG, which some set. The default is dark."""
    answer = _query()
    found = re.search(rb"rgb:([0-9a-fA-F]+)/([0-9a-fA-F]+)/([0-9a-fA-F]+)", answer)
    if found:
        red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in found.groups())
        return bool(0.299 * red + 0.587 * green + 0.114 * blue > 0.5)
    last = os.environ.get("COLORFGBG", "").rpartition(";")[2]
    return last in ("7", "15")


def _query() -> bytes:
    """Return the terminal's answers, or nothing if there is no terminal."""
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
        os.write(sys.stdout.fileno(), QUERY)
        deadline = time.monotonic() + TIMEOUT
        while not TYPE.search(answer) and (left := deadline - time.monotonic()) > 0:
            if not select.select([descriptor], [], [], left)[0]:
                break
            answer += os.read(descriptor, 256)
    except OSError:
        return answer
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)
    return answer
