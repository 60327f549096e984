"""Progress of transcriptions on stderr: a bar for each file that runs, and a summary."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from toolkit.console import SafeConsole

if TYPE_CHECKING:
    import rich.progress


class ProgressDisplay:
    """Bars with the speed, as seconds of sound per second, and the time that is left."""

    def __init__(self, *, is_shown: bool) -> None:
        """is_shown: False where text goes to the same terminal."""
        self.num_seconds = 0.0  # of sound, of files that are complete
        self._started = time.monotonic()
        self._bars = _make_bars() if is_shown and sys.stderr.isatty() else None

    @contextmanager
    def file(self, name: str) -> Iterator[FileProgress]:
        """Show a file's bar within the block."""
        progress = FileProgress(self._bars, name)
        try:
            yield progress
            self.num_seconds += progress.total or 0.0
        finally:
            progress.close()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the bars within the block, which prints to the same terminal."""
        self.stop()
        try:
            yield
        finally:
            self.start()

    def start(self) -> None:
        if self._bars is not None:
            self._bars.start()

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __enter__(self) -> ProgressDisplay:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def summary(self, num_files: int) -> str:
        """Return a line about all files that are complete."""
        seconds = time.monotonic() - self._started
        files = "1 file" if num_files == 1 else f"{num_files} files"
        return (
            f"{files}, {_clock(self.num_seconds)} of sound in {seconds:.1f} s: "
            f"{self.num_seconds / max(seconds, 1e-9):.1f}× real time"
        )


class FileProgress:
    """Progress of one file."""

    def __init__(self, bars: rich.progress.Progress | None, name: str) -> None:
        self.total: float | None = None  # seconds; None until the server has read the file
        self._bars, self._started = bars, 0.0
        self._id = bars.add_task(name, total=None, speed="") if bars is not None else None

    def update(self, seconds: float, total: float) -> None:
        """Show the seconds that are transcribed."""
        now = time.monotonic()
        if self.total is None:
            self._started = now
        self.total = total
        if self._bars is not None and self._id is not None:
            speed = seconds / max(now - self._started, 1e-3)
            shown = f"{speed:.1f}× real time" if seconds else ""
            self._bars.update(self._id, completed=seconds, total=total, speed=shown)

    def close(self) -> None:
        if self._bars is not None and self._id is not None:
            self._bars.remove_task(self._id)


def _make_bars() -> rich.progress.Progress:
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeftColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}", markup=False),
        TimeLeftColumn(compact=True),
        TextColumn("left"),
        console=SafeConsole(stderr=True),
        transient=True,
        redirect_stdout=False,
    )


def _clock(seconds: float) -> str:
    """Return a length such as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
