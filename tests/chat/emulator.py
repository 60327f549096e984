"""A terminal in memory, emulated by pyte, with scrollback."""

from __future__ import annotations

import io

import pyte
from pyte.screens import Char

from toolkit.chat.screen.terminal import Terminal


class Emulator(io.TextIOBase):
    """Draws the text written to it on a screen of `columns` by `rows`."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.001)
        self.stream = pyte.Stream(self.screen)
        self.written: list[str] = []
        self.terminal = Terminal(self, self)
        for console in (self.terminal.console, self.terminal.err_console):
            console.size = (columns, rows)  # type: ignore[assignment]  # rich's setter takes a pair

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.append(text)
        # The kernel's terminal turns \n into \r\n.
        self.stream.feed(text.replace("\r\n", "\n").replace("\n", "\r\n"))
        return len(text)

    @property
    def lines(self) -> list[str]:
        """All lines, with the scrollback, without empty ones at the end."""
        width = self.screen.columns
        above = [self._text([line[x] for x in range(width)]) for line in self.screen.history.top]
        # Like `screen.display`, which asks for the width of each character, and is slow.
        buffer = self.screen.buffer
        shown = [self._text([buffer[y][x] for x in range(width)]) for y in range(self.screen.lines)]
        found = [line.rstrip() for line in [*above, *shown]]
        while found and not found[-1]:
            found.pop()
        return found

    @property
    def text(self) -> str:
        """All words, with single spaces."""
        return " ".join("\n".join(self.lines).split())

    def styles_of(self, word: str) -> list[Char]:
        """Return the characters of a word on the screen, with their styles."""
        for y, line in enumerate(self.screen.display):
            if (x := line.find(word)) >= 0:
                return [self.screen.buffer[y][x + i] for i in range(len(word))]
        raise AssertionError(f"{word!r} is not on the screen")

    @staticmethod
    def _text(characters: list[Char]) -> str:
        # The second half of a wide character is empty.
        return "".join(character.data for character in characters)
