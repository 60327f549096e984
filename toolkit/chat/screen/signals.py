"""Handlers of Ctrl-C and Ctrl-Z while no prompt reads the keyboard."""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from toolkit.chat.screen.terminal import Keyboard

DOUBLE_PRESS = 1.0  # seconds; two Ctrl-C within them leave the chat


class Signals:
    """Ctrl-C stops the answer; a second one within a second leaves. Ctrl-Z suspends."""

    def __init__(self, keyboard: Keyboard) -> None:
        self.should_leave = False
        self._keyboard = keyboard
        self._last_press = -DOUBLE_PRESS
        self._stop: Callable[[], object] | None = None
        self._redraw: Callable[[], object] | None = None

    def install(self) -> None:
        """Install the handlers. Call it again after a prompt, which replaces them."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._interrupt)
        loop.add_signal_handler(signal.SIGTSTP, self.suspend)

    @contextmanager
    def handle(self, stop: Callable[[], object], redraw: Callable[[], object]) -> Iterator[None]:
        """Make Ctrl-C call `stop` inside the block, and a resume from the shell call `redraw`."""
        self.install()
        self._stop, self._redraw = stop, redraw
        try:
            yield
        finally:
            self._stop = self._redraw = None

    def count_ctrl_c(self, now: float) -> None:
        """Count a Ctrl-C at time `now` of the monotonic clock."""
        self.should_leave |= now - self._last_press <= DOUBLE_PRESS
        self._last_press = now

    def suspend(self) -> None:
        """Stop this process until the shell's `fg`."""
        self._keyboard.restore()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGTSTP)
        os.kill(os.getpid(), signal.SIGTSTP)
        self.install()
        self._keyboard.hide_input()
        if self._redraw is not None:
            self._redraw()

    def _interrupt(self) -> None:
        self.count_ctrl_c(time.monotonic())
        if self._stop is not None:
            self._stop()
