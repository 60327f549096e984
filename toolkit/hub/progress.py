"""Progress of downloads, with huggingface_hub."""

import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.gguf.names import split_name
from toolkit.logs import escape_line, flush_stderr, writes_json
from toolkit.units import size

logger = logging.getLogger(__name__)

INTERVAL = 30.0  # seconds between two lines about a download
# Format of the progress bar, for tqdm.
FORMAT = (
    "{desc}  {percentage:3.0f} % {bar} {n_fmt}iB of {total_fmt}iB, {rate_fmt}, {remaining} left"
)


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Iterator[type]:
    """Yield a tqdm class that shows only the byte counter of the library's three bars.

    Elsewhere than on a terminal it prints a line now and then. `num_bytes`: of the missing files,
    0: nothing is shown."""
    from huggingface_hub.utils import tqdm

    if num_bytes:
        _print(f"{label}: downloading {size(num_bytes)}.")
    shown: list[Any] = []
    is_terminal = sys.stderr.isatty() and not writes_json()
    lines = _Lines(label, num_bytes)

    class Bar(tqdm):  # type: ignore[misc]  # the library has no types
        # The library's own total grows with each file.
        total = property(lambda self: num_bytes, lambda self, value: None)

        def __init__(self, *arguments: Any, name: str | None = None, **settings: Any) -> None:
            self._counts_bytes = name == "huggingface_hub.snapshot_download" and num_bytes > 0
            if not (self._counts_bytes and is_terminal):
                settings["disable"] = True
            settings |= {
                "desc": label,
                "unit": "iB",
                "unit_divisor": 1024,
                "bar_format": FORMAT,
                "leave": False,
            }
            super().__init__(*arguments, **settings)
            shown.append(self)

        def update(self, n: float = 1) -> Any:
            """Add to the bar, or print a line elsewhere than on a terminal."""
            if self._counts_bytes and not is_terminal:
                lines.add(n)
            return super().update(n)

        def set_description(self, *_: Any, **__: Any) -> None:
            """Keep the label."""

    try:
        yield Bar
    finally:
        for bar in shown:
            bar.close()


@contextmanager
def without_bars() -> Iterator[None]:
    """Hide the library's bars for small files."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


class _Lines:
    """Prints a line with the share of a download now and then."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0.0
        self._start = time.monotonic()
        self._due = self._start + INTERVAL

    def add(self, num_bytes: float) -> None:
        self._done += num_bytes
        if (now := time.monotonic()) >= self._due:
            self._due = now + INTERVAL
            rate = size(self._done / max(now - self._start, 1e-6))
            share = f"{self._done / self._total:.0%} of {size(self._total)}"
            _print(f"{self._label}: {share}, {rate}/s.")


def _print(text: str) -> None:
    if writes_json():
        logger.info("%s", text)
    else:
        print(escape_line(text), file=sys.stderr, flush=True)


_REMOVE_PARTIAL = """
import os, sys
for entry in os.scandir(sys.argv[1]) if os.path.isdir(sys.argv[1]) else ():
    if entry.name.endswith(".incomplete") and entry.stat().st_mtime >= float(sys.argv[2]):
        os.unlink(entry.path)
sys.exit(130)
"""
"""Program that removes files that the library would not resume."""


@contextmanager
def exit_on_ctrl_c(name: str) -> Iterator[None]:
    """Exit at once on Ctrl-C: the library would first finish all files that it has started."""
    from huggingface_hub import constants

    began = time.time()
    repository, _ = split_name(name)
    blobs = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "blobs")

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if sys.stderr.isatty():
            print(file=sys.stderr)  # leaves the bar's line
        _print("Stopped. Complete files are kept.")
        flush_stderr()
        # Another program in this process ends the library's threads, which go on making files.
        arguments = (str(blobs), str(began))
        os.execv(sys.executable, (sys.executable, "-I", "-S", "-c", _REMOVE_PARTIAL, *arguments))

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
