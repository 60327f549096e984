"""`tk pull`: a model of the hub into its cache, through huggingface_hub's own code."""

from __future__ import annotations

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

from toolkit.errors import CheckpointError, ConfigError, ModelNotFoundError
from toolkit.inventory.console import talk
from toolkit.models import hub
from toolkit.units import size

FORMAT = (
    "{desc}  {percentage:3.0f} % {bar} {n_fmt}iB of {total_fmt}iB, {rate_fmt}, {remaining} left"
)
"""Of the bar, as tqdm reads it."""


def pull(name: str, revision: str | None) -> Path:
    """The folder of the model, with all that `tk serve` needs of it. Files that an earlier attempt has
    fetched are kept, and a connection that breaks is gone on with.

    Raises ModelNotFoundError when the hub does not have it for us or does not answer, CheckpointError when the disk has
    no room for it.
    """
    if hub.is_path(name):
        raise ConfigError(
            f"tk pull takes the name of a model of the hub, such as org/model; it got {name!r}."
        )
    try:
        missing = _missing(name, revision)
        if missing:
            _require_room(name, missing)
            talk(f"{name}: {size(missing)} to fetch.")
        with _bar(name, missing) as bar, _ended_by_ctrl_c(name):
            return hub.fetch(name, revision, with_card=True, bar=bar)
    except hub.HubSilentError as silent:
        cached = hub.cached_snapshot(name, revision, with_weights=True)
        there = f" An earlier download of it is in {cached}." if cached is not None else ""
        raise ModelNotFoundError(
            f"{name} was not fetched: {silent.message}. The hub is {_endpoint()} (HF_ENDPOINT); files that were "
            f"complete are kept.{there}"
        ) from None


@contextmanager
def _ended_by_ctrl_c(name: str) -> Iterator[None]:
    """Ctrl-C ends the process at once: the library would wait until all files that it has begun are fetched."""
    from huggingface_hub import constants

    began = time.time()
    blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")

    def end(number: int, frame: object) -> None:
        for piece in blobs.glob("*.incomplete"):
            with suppress(OSError):  # it may be whole by now, and have another name
                if piece.stat().st_mtime >= began:
                    piece.unlink()  # the library would not go on with it
        print("\nStopped. Files that were complete are kept.", file=sys.stderr, flush=True)
        os._exit(130)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _missing(name: str, revision: str | None) -> int:
    """Bytes that the cache lacks."""
    with hub.asking(name, revision):
        from huggingface_hub import model_info, try_to_load_from_cache

        info = model_info(name, revision=revision, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        patterns = hub.wanted_files(files)
        wanted = [
            file for file in files if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
        ]
        return sum(
            files[file]
            for file in wanted
            if not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)
        )


@contextmanager
def _bar(label: str, num_bytes: int) -> Iterator[type]:
    """Of the three bars that the hub's library shows on a terminal, the one that counts bytes; gone at the end."""
    from huggingface_hub.utils import tqdm

    shown: list[Any] = []

    class Bar(tqdm):  # type: ignore[misc]  # the library comes without types
        total = property(
            lambda self: num_bytes, lambda self, value: None
        )  # the library's grows file by file

        def __init__(self, *arguments: Any, name: str | None = None, **settings: Any) -> None:
            if name != "huggingface_hub.snapshot_download" or not num_bytes:
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

        def set_description(self, *_: Any, **__: Any) -> None:
            """It stays as it is."""

    try:
        yield Bar
    finally:
        for bar in shown:
            bar.close()


def _require_room(name: str, num_bytes: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    there = next(folder for folder in (place, *place.parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if num_bytes > free:
        raise CheckpointError(
            f"{name} takes {size(num_bytes)} more, and {size(free)} are free in {place}. tk rm makes room, and HF_HOME "
            f"names another place."
        )


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
