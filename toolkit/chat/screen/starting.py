"""Progress of a server or an engine that starts."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.text import Text

from toolkit.chat.screen.terminal import Terminal
from toolkit.logs import PROGRESS, escape_line

Tick = Callable[[float, str], None]
"""Called with the seconds that a start has taken so far, and the last line of its log."""

INTERVAL = 0.1  # seconds
PATIENCE = 30.0  # seconds between two lines where no spinner turns


@contextmanager
def show_progress(terminal: Terminal, task: str) -> Iterator[Tick]:
    """Yield a function that shows the progress of `task`; negative seconds end it.

    A line in the terminal, elsewhere a line now and then. The spinner's thread starts with the
    first call, so that a child can be forked before."""
    if not terminal.err_console.is_terminal:
        terminal.note(f"{task} ...")
        yield _lines(terminal, task)
        return
    status = terminal.err_console.status(Text(f"{task} ..."))

    def tick(seconds: float, line: str) -> None:
        if seconds < 0:
            status.stop()
        else:
            status.update(_text(terminal, task, seconds, line))
            status.start()

    try:
        yield tick
    finally:
        status.stop()


def _lines(terminal: Terminal, task: str) -> Tick:
    """Return a function that prints a line each PATIENCE seconds."""
    due = PATIENCE

    def tick(seconds: float, line: str) -> None:
        nonlocal due
        if seconds >= due:
            due += PATIENCE
            terminal.note(_text(terminal, task, seconds, line).plain)

    return tick


def _text(terminal: Terminal, task: str, seconds: float, line: str) -> Text:
    text = Text(f"{task} ... {seconds:.0f} s", no_wrap=True, overflow="ellipsis")
    if line:
        text.append(f"  {escape_line(' '.join(line.split()))}", style="dim")
    if terminal.err_console.is_terminal:
        text.truncate(max(20, terminal.size().columns - 4), overflow="ellipsis")
    return text


class _LastMessage(logging.Handler):
    """Keeps the last message."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


@contextmanager
def ticking(tick: Tick) -> Iterator[None]:
    """Show the progress of a start in this process, from another thread."""
    last, ended = _LastMessage(), threading.Event()
    started = time.monotonic()

    def run() -> None:
        while not ended.wait(INTERVAL):
            tick(time.monotonic() - started, last.text)

    thread = threading.Thread(target=run, daemon=True)
    PROGRESS.addHandler(last)
    PROGRESS.disabled = False
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        PROGRESS.removeHandler(last)
        PROGRESS.disabled = True
