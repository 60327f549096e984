"""Ctrl-C and Ctrl-Z while no prompt reads them as keys."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.chat.screen.terminal import Keyboard

SECOND_CTRL_C = 1.0  # seconds within which it leaves


class Signals:
    """The first Ctrl-C stops what goes on, a second one soon after it leaves. Ctrl-Z gives the terminal to the shell."""

    def __init__(self, keyboard: Keyboard) -> None:
        self.leave = False
        self._keyboard = keyboard
        self._last = -SECOND_CTRL_C
        self._stop: Callable[[], object] | None = None
        self._redraw: Callable[[], object] | None = None

    def listen(self) -> None:
        """Takes the signals. To be called again when something else has taken them, such as a prompt."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTSTP, self.suspend)

    @contextmanager
    def during(self, stop: Callable[[], object], redraw: Callable[[], object]) -> Iterator[None]:
        """Within it Ctrl-C calls `stop`, and a return from the shell calls `redraw`."""
        self.listen()
        self._stop, self._redraw = stop, redraw
        try:
            yield
        finally:
            self._stop = self._redraw = None

    def press(self, now: float) -> None:
        """Counts a Ctrl-C, at a time of the monotonic clock."""
        self.leave |= now - self._last <= SECOND_CTRL_C
        self._last = now

    def suspend(self) -> None:
        """Sleeps until the shell's `fg`."""
        self._keyboard.restore()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self.listen()
        self._keyboard.hush()
        if self._redraw is not None:
            self._redraw()

    def _interrupt(self) -> None:
        self.press(time.monotonic())
        if self._stop is not None:
            self._stop()
