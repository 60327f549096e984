"""A terminal in memory (pyte's, which knows nothing of ours), with all that has scrolled off its top."""

from __future__ import annotations

import io

import pyte
from pyte.screens import Char

from toolkit.chat.screen.terminal import Terminal


class Emulator(io.TextIOBase):
    """What is written here is drawn on a screen of `columns` and `rows`."""

    def __init__(self, columns: int = 80, rows: int = 24) -> None:
        self.screen = pyte.HistoryScreen(columns, rows, history=100_000, ratio=0.001)
        self.stream = pyte.Stream(self.screen)
        self.written: list[str] = []
        self.terminal = Terminal(self, self)
        self.terminal.console.size = self.terminal.talk.size = (columns, rows)  # type: ignore[assignment]  # rich's setter takes a pair

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.append(text)
        self.stream.feed(
            text.replace("\r\n", "\n").replace("\n", "\r\n")
        )  # as the kernel's terminal does
        return len(text)

    @property
    def lines(self) -> list[str]:
        """Every line, from the first that has scrolled away to the last that has something on it."""
        width = self.screen.columns
        above = [self._text([line[x] for x in range(width)]) for line in self.screen.history.top]
        found = [line.rstrip() for line in [*above, *self.screen.display]]
        while found and not found[-1]:
            found.pop()
        return found

    @property
    def text(self) -> str:
        """Every word on it, with single spaces."""
        return " ".join("\n".join(self.lines).split())

    def styles_of(self, word: str) -> list[Char]:
        """The characters of a word on the screen, with their styles."""
        for y, line in enumerate(self.screen.display):
            if (x := line.find(word)) >= 0:
                return [self.screen.buffer[y][x + i] for i in range(len(word))]
        raise AssertionError(f"{word!r} is not on the screen")

    @staticmethod
    def _text(characters: list[Char]) -> str:
        return "".join(
            character.data for character in characters
        )  # the second half of a wide one is empty
