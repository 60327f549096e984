"""The last lines on the screen, which can be redrawn."""

import os
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.text import Text

# Between the two, the terminal shows no change yet and cuts lines that are too wide.
BEGIN_UPDATE = "\x1b[?2026h\x1b[?7l"
END_UPDATE = "\x1b[?7h\x1b[?2026l"
ERASE_LINE = "\x1b[2K"
ERASE_BELOW = "\x1b[J"


class Region:
    """Lines at the end of the screen.

    A redraw writes the lines from the first changed one on, in one update, so that nothing
    flickers. Lines that have scrolled off the top of the screen can no longer change."""

    def __init__(self, out: TextIO, size: Callable[[], os.terminal_size]) -> None:
        self._out = out
        self._size = size
        self._lines: list[str] = []  # on the screen; the cursor is at the end of the last one
        self._num_scrolled = 0  # lines before them, off the screen
        self._columns = 0

    def draw(self, lines: Sequence[str]) -> None:
        """Replace the shown lines. They have no line breaks and are narrower than the screen."""
        columns, rows = self._size()
        lost = max(0, len(self._lines) - rows)  # the screen got fewer rows
        self._lines, self._num_scrolled = self._lines[lost:], self._num_scrolled + lost
        new = list(lines[self._num_scrolled :])
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
            written = self._move_up_to(same, columns) + (
                ERASE_LINE + new[same] if same < len(new) else ""
            )
        written += "".join(f"\r\n{ERASE_LINE}{line}" for line in new[same + 1 :])
        if len(new) < len(self._lines) or columns != self._columns:
            written = written + ERASE_BELOW if new[same:] else self._shrink(same, written)
        self._out.write(BEGIN_UPDATE + written + END_UPDATE)
        self._out.flush()
        self._columns = columns
        pushed = max(0, len(new) - rows)
        self._num_scrolled += pushed
        self._lines = new[pushed:]

    def commit(self) -> None:
        """Keep the shown lines for good; draw the next ones below them."""
        if self._lines:
            self._out.write("\r\n")
            self._out.flush()
        self.reset()

    def reset(self) -> None:
        """Draw all lines again next time, because another program wrote to the screen."""
        self._lines, self._num_scrolled = [], 0

    def _move_up_to(self, line: int, columns: int) -> str:
        """Return the codes that move the cursor to the start of a line on the screen."""
        rows = [1] * (len(self._lines) - line)
        if columns < self._columns:  # the terminal got narrower and wrapped the lines
            widths = [Text.from_ansi(text).cell_len for text in self._lines[line:]]
            rows = [max(1, -(-width // columns)) for width in widths]
        up = sum(rows) - 1
        return "\r" + (f"\x1b[{up}A" if up else "")

    def _shrink(self, kept: int, moved: str) -> str:
        """Add codes to `moved` that erase all but `kept` lines and put the cursor at their end."""
        if kept == 0:
            return moved + ERASE_BELOW
        return f"{moved}{ERASE_BELOW}\x1b[A\r{self._lines[kept - 1]}"
