"""The terminal: answers go to stdout, everything else to stderr; keys come from stdin."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TextIO

from rich.text import Text

from toolkit.console import SafeConsole
from toolkit.logs import escape_controls

BRACKETED_PASTE = ("\x1b[?2004h", "\x1b[?2004l")  # on, off


class Keyboard:
    """Input mode of the terminal on stdin. Does nothing if stdin is no terminal."""

    def __init__(self) -> None:
        self._saved_mode: list[Any] | None = None

    @contextmanager
    def hidden_input(self) -> Iterator[None]:
        """Hide keys typed inside the block; the next prompt reads them. Ctrl-C and Ctrl-Z work."""
        self.hide_input()
        try:
            yield
        finally:
            self.restore()

    def hide_input(self) -> None:
        """Turn off echo. Call it again after a prompt, which sets its own mode."""
        import termios

        if not _is_foreground():
            return
        mode = termios.tcgetattr(0)
        if self._saved_mode is None:
            self._saved_mode = list(mode)
        mode[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(0, termios.TCSANOW, mode)
        # Text pasted now also becomes one question.
        self._set_bracketed_paste(BRACKETED_PASTE[0])

    def restore(self) -> None:
        import termios

        if self._saved_mode is not None:
            termios.tcsetattr(0, termios.TCSANOW, self._saved_mode)
            self._saved_mode = None
            self._set_bracketed_paste(BRACKETED_PASTE[1])

    @staticmethod
    def _set_bracketed_paste(code: str) -> None:
        if sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
            sys.stderr.write(code)
            sys.stderr.flush()


def printable(text: str) -> str:
    """Replace bytes that are not text, which Python decodes as lone surrogates."""
    return text.encode(errors="replace").decode()


def _is_foreground() -> bool:
    """Return True if stdin is a terminal and this process is in its foreground."""
    try:
        return sys.stdin.isatty() and os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # the terminal belongs to another session
        return False


class Terminal:
    """stdout, stderr, and the keyboard."""

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self.out = sys.stdout if out is None else out
        for stream in (self.out, sys.stderr if err is None else err):
            if isinstance(stream, TextIOWrapper):  # its encoding may lack characters
                stream.reconfigure(errors="replace")
        self.err_console = SafeConsole(file=err, stderr=err is None)
        self.err_console.soft_wrap = not self.err_console.is_terminal  # one line each in a file
        self.console = SafeConsole(file=self.out)
        self.is_live = self.console.is_terminal and not self.console.is_dumb_terminal
        """True if text on the screen can be redrawn."""
        self.keyboard = Keyboard()

    def size(self) -> os.terminal_size:
        width, height = self.console.size
        return os.terminal_size((width, height))

    def write(self, text: str) -> None:
        """Write part of an answer and flush. A pipe gets it unchanged."""
        self.out.write(escape_controls(text) if self.console.is_terminal else text)
        self.out.flush()

    def note(self, text: str) -> None:
        """Print a dim message to stderr."""
        if text:
            self.err_console.print(Text(text, style="dim"))

    def hint(self, text: str) -> None:
        """Print a dim message if stderr is a terminal."""
        if self.err_console.is_terminal:
            self.note(text)

    def blank_line(self) -> None:
        """Print an empty line if stderr is a terminal."""
        if self.err_console.is_terminal:
            self.err_console.print()

    def error(self, text: str) -> None:
        self.err_console.print(Text(text, style="red"))
