"""Where the chat writes: answers on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.text import Text

# An answer can hold anything; control characters but tab and newline could take over the terminal.
CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))


class Terminal:
    """The two streams of the program."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        self.talk = Console(file=err, stderr=err is None, highlight=False, soft_wrap=True)

    def piece(self, text: str) -> None:
        """A piece of an answer, at once. What goes into a pipe goes as it came."""
        self.out.write(text.translate(CONTROLS) if self.out.isatty() else text)
        self.out.flush()

    def end_answer(self, answer: str) -> None:
        """The next thing written begins a line."""
        if not answer.endswith("\n"):
            self.out.write("\n")
            self.out.flush()

    def note(self, text: str) -> None:
        """Something in passing."""
        if text:
            self.talk.print(Text(text, style="dim"))

    def error(self, text: str) -> None:
        self.talk.print(Text(text, style="red"))
