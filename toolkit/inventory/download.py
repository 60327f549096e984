"""`tk pull`: download a model into the hub's cache, with huggingface_hub."""

import fnmatch
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from toolkit import hub
from toolkit.errors import CheckpointError, ConfigError, ModelNotFoundError
from toolkit.gguf.names import split_name
from toolkit.inventory.console import print_note
from toolkit.inventory.recommended import advice
from toolkit.units import size

INTERVAL = 30.0  # seconds between two lines about a download
# Format of the progress bar, for tqdm.
FORMAT = (
    "{desc}  {percentage:3.0f} % {bar} {n_fmt}iB of {total_fmt}iB, {rate_fmt}, {remaining} left"
)


def download_missing(model: str | None, revision: str | None = None) -> None:
    """Download a model of the hub that is not on this machine, with a progress bar.

    Whoever loads it reports a model that is not found. Raises CheckpointError for a full disk."""
    if model is None or hub.is_local(model):
        return
    if hub.cached_snapshot(model, revision, with_weights=True) is None:
        with suppress(ModelNotFoundError):
            pull(model, revision)


def pull(name: str, revision: str | None) -> Path:
    """Download all files that `tk serve` needs, and return the model's folder, or its GGUF file.

    Cached files are kept, and broken connections resumed. Raises ModelNotFoundError if the hub
    does not answer, has no such model or denies access, and CheckpointError if the disk is full."""
    if hub.is_demo(name):
        raise ConfigError(f"{name} comes with tk: there is nothing to download.")
    if hub.is_path(name):
        raise ConfigError(
            f"tk pull takes the name of a model on the hub, such as org/model; got {name!r}."
            f"{hub.address_hint(name)}"
        )
    try:
        missing = _missing_bytes(name, revision)
        if missing:
            _require_space(name, missing)
            print_note(f"{name}: downloading {size(missing)}.")
        with _progress_bar(name, missing) as bar, _exit_on_ctrl_c(name):
            return hub.fetch(name, revision, with_card=True, bar=bar)
    except hub.HubUnreachableError as unreachable:
        cached = hub.cached_snapshot(name, revision, with_weights=True)
        earlier = f" An earlier download is in {cached}." if cached is not None else ""
        raise ModelNotFoundError(
            f"{name} was not downloaded: {unreachable.message}. The hub is {_endpoint()} "
            f"(HF_ENDPOINT). Complete files are kept.{earlier}{hub.owner_hint(name)}{advice(name)}"
        ) from None
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.message + advice(name)) from None


_REMOVE_PARTIAL = """
import os, sys
for entry in os.scandir(sys.argv[1]) if os.path.isdir(sys.argv[1]) else ():
    if entry.name.endswith(".incomplete") and entry.stat().st_mtime >= float(sys.argv[2]):
        os.unlink(entry.path)
sys.exit(130)
"""
"""Program that removes files that the library would not resume."""


@contextmanager
def _exit_on_ctrl_c(name: str) -> Iterator[None]:
    """Exit at once on Ctrl-C: the library would first finish all files that it has started."""
    from huggingface_hub import constants

    began = time.time()
    repository, _ = split_name(name)
    blobs = Path(constants.HF_HUB_CACHE, f"models--{repository.replace('/', '--')}", "blobs")

    def stop(number: int, frame: object) -> None:
        print("\nStopped. Complete files are kept.", file=sys.stderr, flush=True)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Another program in this process ends the library's threads, which go on making files.
        arguments = (str(blobs), str(began))
        os.execv(sys.executable, (sys.executable, "-I", "-S", "-c", _REMOVE_PARTIAL, *arguments))

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _missing_bytes(name: str, revision: str | None) -> int:
    """Return the size of the files that are not in the cache."""
    name, quantization = split_name(name)
    with hub.hub_errors(name, revision):
        from huggingface_hub import model_info, try_to_load_from_cache

        info = model_info(name, revision=revision, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        patterns = hub.wanted_files(files, gguf=hub.choose_gguf(files, quantization, name))
        wanted = [
            file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
        ]
        return sum(
            files[file]
            for file in wanted
            if not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)
        )


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
            print_note(f"{self._label}: {share}, {rate}/s.")


@contextmanager
def _progress_bar(label: str, num_bytes: int) -> Iterator[type]:
    """Return a tqdm class that shows only the byte counter of the library's three bars."""
    from huggingface_hub.utils import tqdm

    shown: list[Any] = []
    is_terminal = sys.stderr.isatty()
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


def _require_space(name: str, num_bytes: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise CheckpointError(
            f"{name} needs {size(num_bytes)} more, and {size(free)} are free in {cache}. Free "
            f"space with tk rm, or set HF_HOME to store models elsewhere."
        )


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
