"""Builds that tests need, kept from one run to the next while their sources stay the same."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Read once: tests set HOME to a temporary folder.
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tk-tests"
KEPT = 3
"""Builds of a name that stay. More than one serves several checkouts of different versions."""


def build(
    name: str, sources: Iterable[Path], settings: object, make: Callable[[Path], None]
) -> Path:
    """Return the folder that `make` filled, or that it filled before from equal sources.

    settings: the rest that decides the result, such as flags and versions. `make` gets an empty
    folder, which gets its name when it is complete: two runs may build at a time."""
    key = hashlib.sha256(repr(settings).encode())
    for source in sorted(sources):
        content = source.read_bytes()
        key.update(f"{source.relative_to(ROOT)} {len(content)} ".encode() + content)
    target = CACHE / name / key.hexdigest()
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder, "made")
            made.mkdir()
            make(made)
            with contextlib.suppress(OSError):  # another run was faster
                made.rename(target)
    os.utime(target)
    remove_old(target.parent, KEPT)
    return target


def remove_old(folder: Path, kept: int, seconds: float = 3600.0) -> None:
    """Remove all but the latest files and folders, if they were not used for an hour."""
    times = {}
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            times[path] = path.stat().st_mtime
    for path in sorted(times, key=times.__getitem__)[: -kept or None]:
        if times[path] < time.time() - seconds:
            shutil.rmtree(path, ignore_errors=True)
