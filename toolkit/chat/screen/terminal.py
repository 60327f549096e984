"""The two streams of the program: answers go to stdout, everything else to stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
"""An answer can hold anything; control characters but tab and newline could take over the terminal."""
MARKED_PASTES = ("\x1b[?2004h", "\x1b[?2004l")


class Keyboard:
    """The terminal that keys come from, if they do."""

    def __init__(self) -> None:
        self._usual: list[Any] | None = None

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Within it keys are not shown: they wait for the next question. Ctrl-C and Ctrl-Z work."""
        self.hush()
        try:
            yield
        finally:
            self.restore()

    def hush(self) -> None:
        """To be called again after a prompt, which leaves its own mode."""
        import termios

        if not _is_ours():
            return
        mode = termios.tcgetattr(0)
        if self._usual is None:
            self._usual = list(mode)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(0, termios.TCSANOW, mode)
        self._mark_pastes(
            MARKED_PASTES[0]
        )  # what is pasted now is one text for the next question, too

    def restore(self) -> None:
        import termios

        if self._usual is not None:
            termios.tcsetattr(0, termios.TCSANOW, self._usual)
            self._usual = None
            self._mark_pastes(MARKED_PASTES[1])

    @staticmethod
    def _mark_pastes(code: str) -> None:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            sys.stderr.write(code)
            sys.stderr.flush()


def printable(text: str) -> str:
    """What was typed or given, without bytes that are no text (Python keeps them as lone surrogates)."""
    return text.encode(errors="replace").decode()


def _is_ours() -> bool:
    """Whether there are keys, and the shell has not put the program into the background."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # it is not the terminal of this session
        return False


class Terminal:
    """stdout, stderr, and the keyboard."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        for stream in (self.out, sys.stderr if err is None else err):
            if isinstance(stream, TextIOWrapper):  # what an old encoding lacks is no reason to fail
                stream.reconfigure(errors="replace")
        self.talk = Console(file=err, stderr=err is None, highlight=False)
        self.talk.soft_wrap = not self.talk.is_terminal  # in a file a message stays one line
        self.console = Console(file=self.out, highlight=False)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        """Whether what has been written can be written anew."""
        self.keyboard = Keyboard()

    def size(self) -> os.terminal_size:
        width, height = self.console.size
        return os.terminal_size((width, height))

    def write(self, text: str) -> None:
        """A piece of an answer, at once. What goes into a pipe goes as it came."""
        self.out.write(text.translate(CONTROLS) if self.console.is_terminal else text)
        self.out.flush()

    def note(self, text: str) -> None:
        """Something in passing."""
        if text:
            self.talk.print(Text(text, style="dim"))

    def hint(self, text: str) -> None:
        """Something in passing, for somebody who looks."""
        if self.talk.is_terminal:
            self.note(text)

    def gap(self) -> None:
        """An empty line, where somebody looks."""
        if self.talk.is_terminal:
            self.talk.print()

    def error(self, text: str) -> None:
        self.talk.print(Text(text, style="red"))
