"""The end of what is on the screen, which may still change."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.text import Text

BEGIN = "\x1b[?2026h\x1b[?7l"  # show nothing until END; a line that is too wide is cut, not wrapped
END = "\x1b[?7h\x1b[?2026l"
ERASE_LINE = "\x1b[2K"
ERASE_BELOW = "\x1b[J"


class Region:
    """Lines at the end of the screen. Drawing writes from the first one that differs on, at once, so that nothing
    flickers. What is pushed off the top of the screen can be reached no more and stays as it is.
    """

    def __init__(self, out: TextIO, size: Callable[[], os.terminal_size]) -> None:
        self._out = out
        self._size = size
        self._lines: list[str] = []  # on the screen; the cursor is at the end of the last one
        self._gone = 0  # lines before them, off the screen
        self._columns = 0

    def draw(self, lines: Sequence[str]) -> None:
        """Shows these lines in place of what it shows now. They hold no line breaks, and are narrower than the
        screen.
        """
        columns, rows = self._size()
        lost = max(0, len(self._lines) - rows)  # the screen has become lower
        self._lines, self._gone = self._lines[lost:], self._gone + lost
        new = list(lines[self._gone :])
        same = 0
        while same < min(len(new), len(self._lines)) and new[same] == self._lines[same]:
            same += 1
        if same == len(new) == len(self._lines):
            return
        if (
            same == len(self._lines) - 1
            and same < len(new)
            and new[same].startswith(self._lines[same])
        ):
            written = new[same][len(self._lines[same]) :]
        elif same == len(self._lines):
            written = ("\r\n" if same else "") + new[same]
        else:
            written = self._back_to(same, columns) + (
                ERASE_LINE + new[same] if same < len(new) else ""
            )
        written += "".join(f"\r\n{ERASE_LINE}{line}" for line in new[same + 1 :])
        if len(new) < len(self._lines) or columns != self._columns:
            written = written + ERASE_BELOW if new[same:] else self._shrunk(same, written)
        self._out.write(BEGIN + written + END)
        self._out.flush()
        self._columns = columns
        pushed = max(0, len(new) - rows)
        self._gone += pushed
        self._lines = new[pushed:]

    def commit(self) -> None:
        """What is shown stays, and the next thing is drawn below it."""
        if self._lines:
            self._out.write("\r\n")
            self._out.flush()
        self.forget()

    def forget(self) -> None:
        """Something else has written to the screen: the next drawing begins anew."""
        self._lines, self._gone = [], 0

    def _back_to(self, line: int, columns: int) -> str:
        """Moves the cursor to the beginning of a line on the screen."""
        rows = [1] * (len(self._lines) - line)
        if (
            columns < self._columns
        ):  # the terminal has become narrower, and has wrapped what was there
            widths = [Text.from_ansi(text).cell_len for text in self._lines[line:]]
            rows = [max(1, -(-width // columns)) for width in widths]
        up = sum(rows) - 1
        return "\r" + (f"\x1b[{up}A" if up else "")

    def _shrunk(self, kept: int, moved: str) -> str:
        """Nothing is left from a line on: the cursor goes to the end of the one before it."""
        if kept == 0:
            return moved + ERASE_BELOW
        return f"{moved}{ERASE_BELOW}\x1b[A\r{self._lines[kept - 1]}"
