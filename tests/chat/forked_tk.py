"""`tk` in a process that a fork server forked, with the streams that Python would open."""

from __future__ import annotations

import fcntl
import os
import sys
import termios

from toolkit.cli import main


def open_streams() -> None:
    """Replace those of the fork server. A terminal becomes the process's own, for its signals."""
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


if __name__ == "__main__":
    open_streams()
    main()
