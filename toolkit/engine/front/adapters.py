"""LoRA adapters that requests can name: their folders, and which revision is served."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from toolkit.config import EngineConfig, LoRAConfig
from toolkit.errors import (
    CheckpointError,
    InvalidRequestError,
    ModelNotFoundError,
    errors_about,
)
from toolkit.hub import locate_adapter
from toolkit.lora.files import find_adapter, require_lora_dir
from toolkit.sequence import Adapter, LoRARequest

_NAME = re.compile(r"(?!\.{1,2}$)[\w.\-]+")  # of a folder in --lora-dir
MAX_NAME = 256  # characters
MAX_LISTED = 20  # names in a message


def with_local_adapters(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine's processes: adapters are folders. Downloads missing ones.

    Raises ToolkitError, also if --lora-dir is no folder."""
    require_lora_dir(config.lora.lora_dir)
    if not config.lora.adapters:
        return config
    modules = []
    for name, path in config.lora.adapters.items():
        with errors_about(f"adapter {name!r}"):
            folder = str(locate_adapter(path).absolute())
        modules.append(msgspec.json.encode({"name": name, "path": folder}).decode())
    return dataclasses.replace(
        config, lora=dataclasses.replace(config.lora, lora_modules=tuple(modules))
    )


class _Book(msgspec.Struct):
    """Adapters by name."""

    adapters: dict[str, Adapter] = {}
    removed: list[str] = []  # until they are loaded again
    fixed: list[str] = []  # loaded on purpose: served as they were then
    broken: dict[str, str] = {}  # keys of revisions that could not be read


class AdapterRegistry:
    """The adapters of a front end. Several processes that serve one model share a file of them.

    The file is replaced as a whole, so that all processes know an adapter from the same moment on,
    also one that starts later."""

    def __init__(self, config: LoRAConfig, file: Path | None = None) -> None:
        self._config, self._file = config, file
        self._root = (
            None if config.lora_dir is None else Path(config.lora_dir).expanduser().absolute()
        )
        self._book, self._number = _Book(), 0
        """The adapters, and the number of changes of the file."""

    def start(self, adapters: Sequence[Adapter]) -> None:
        """Add adapters that are found at the start, or now in --lora-dir."""
        with self._changing() as book:
            for adapter in adapters:
                if adapter.name not in book.removed:
                    book.adapters.setdefault(adapter.name, adapter)

    @property
    def names(self) -> list[str]:
        """Names that requests may use. Those of folders in --lora-dir come last."""
        return list(self.folders)

    @property
    def folders(self) -> dict[str, str]:
        """Folders by the names that requests may use. Those in --lora-dir come last.

        Adapters that could not be read are left out until their files change."""
        book = self._current()
        known = dict(book.adapters)
        if self._root is not None:
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(self._root)):
                    if name not in known and (adapter := self._in_root(name, book)) is not None:
                        known[name] = adapter
        return {
            name: adapter.folder
            for name, adapter in known.items()
            if name not in book.broken or book.broken[name] != self._newest(adapter).key
        }

    def describe_names(self, *others: str) -> str:
        """Return other names and some of these, for a message. Does not look at the folders."""
        book = self._current()
        known = book.adapters.items()
        names = [*others, *(name for name, one in known if book.broken.get(name) != one.key)]
        listed = [repr(name) for name in names[:MAX_LISTED]]
        if len(names) > MAX_LISTED:
            listed.append(f"{len(names) - MAX_LISTED} more")
        if self._root is not None:
            listed.append("the folders in --lora-dir")
        return ", ".join(listed) or "none"

    @property
    def loaded(self) -> list[Adapter]:
        """Adapters that have been found so far."""
        return list(self._current().adapters.values())

    def explain_missing(self, name: str) -> str | None:
        """Return why `find` returns None for an adapter that was unloaded or lacks a file."""
        book = self._current()
        if name in book.removed:
            return (
                f"The adapter {name!r} was unloaded. POST /v1/load_lora_adapter, for operators, "
                f"loads it again."
            )
        folder = self._folder(name, book)
        if folder is not None and os.path.isdir(folder):
            try:
                find_adapter(name, folder)
            except CheckpointError as error:
                return error.message
        return None

    def note_reading(self, adapter: Adapter, *, is_broken: bool) -> bool:
        """Note that a revision could not be read, or that it could. Return True if that is new."""
        if (self._current().broken.get(adapter.name) == adapter.key) == is_broken:
            return False
        with self._changing() as book:
            if is_broken:
                book.broken[adapter.name] = adapter.key
            else:
                book.broken.pop(adapter.name, None)
        return True

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name, None if there is none."""
        book = self._current()
        if name in book.adapters:
            return self._newest(book.adapters[name])
        adapter = self._in_root(name, book)
        if adapter is None:
            return None
        self.start([adapter])
        return self._current().adapters.get(name)

    def _newest(self, adapter: Adapter) -> Adapter:
        """Return the present revision of an adapter, unless this one was loaded on purpose."""
        name = adapter.name
        is_runtime = self._config.allow_runtime_lora or self._config.enable_lora
        if name in self._current().fixed or (is_runtime and name in self._config.adapters):
            return adapter
        with contextlib.suppress(CheckpointError):
            found = find_adapter(name, Path(adapter.folder))
            if found != adapter:
                with self._changing() as book:
                    if name in book.adapters and name not in book.fixed:
                        book.adapters[name] = found
            return found
        return adapter

    def _in_root(self, name: str, book: _Book) -> Adapter | None:
        """Return the adapter in --lora-dir of a name, None if there is none."""
        folder = self._folder(name, book)
        if folder is not None:
            with contextlib.suppress(CheckpointError):
                return find_adapter(name, folder)
        return None

    def _folder(self, name: str, book: _Book) -> Path | None:
        """Return the folder in --lora-dir that a name would have, None if it can have none."""
        if self._root is None or name in book.removed or not _NAME.fullmatch(name):
            return None
        folder = self._root / name
        return folder if not os.path.islink(folder) or self._is_inside(folder) else None

    def resolve(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a request of `LLM` brings. Raises InvalidRequestError."""
        if request is None:
            return None
        if not self._config.is_enabled:
            raise InvalidRequestError(
                "This engine takes no LoRA adapters. Set enable_lora=True.", param="lora_request"
            )
        if request.lora_path:
            folder = Path(request.lora_path).expanduser().absolute()
            try:
                adapter = find_adapter(request.lora_name, folder)
            except CheckpointError as error:
                raise InvalidRequestError(error.message, param="lora_request") from None
            if self._current().adapters.get(adapter.name) != adapter:
                self.put(adapter)
            return adapter
        found = self.find(request.lora_name)
        if found is None:
            raise InvalidRequestError(
                f"There is no adapter {request.lora_name!r}. Known: {self.describe_names()}. "
                f"A LoRARequest with a lora_path adds one.",
                param="lora_request",
            )
        return found

    def find_at(self, name: str, path: str) -> Adapter:
        """Return the adapter to load at an operator's request.

        Raises InvalidRequestError for a path outside --lora-dir that is none of --lora-modules, and
        ModelNotFoundError if there is no adapter."""
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise InvalidRequestError(
                f"lora_name must have 1 to {MAX_NAME} printable characters.", param="lora_name"
            )
        is_configured = path in self._config.adapters.values()
        try:
            folder = Path(path).expanduser()
            folder = locate_adapter(path) if is_configured else (self._root or Path()) / folder
            is_allowed = is_configured or self._is_inside(folder)
        except (OSError, ValueError, RuntimeError) as error:
            raise InvalidRequestError(
                f"lora_path cannot be used: {str(error).rstrip('.')}.", param="lora_path"
            ) from None
        if not is_allowed:
            allowed = (
                f"Without --lora-dir, only those of --lora-modules can be loaded again: "
                f"{', '.join(self._config.adapters.values())}"
                if self._root is None
                else f"It must be inside {self._root} (--lora-dir)"
            )
            raise InvalidRequestError(
                f"lora_path {path!r} is not allowed. {allowed}.", param="lora_path"
            )
        try:
            return find_adapter(name, folder.absolute())
        except CheckpointError as error:
            raise ModelNotFoundError(error.message, param="lora_path") from None

    def put(self, adapter: Adapter) -> None:
        """Serve an adapter as it is now, in place of another revision of it."""
        name = adapter.name
        with self._changing() as book:
            book.adapters[name] = adapter
            book.broken.pop(name, None)
            if name not in book.fixed:
                book.fixed.append(name)
            if name in book.removed:
                book.removed.remove(name)

    def remove(self, name: str) -> Adapter | None:
        """Serve an adapter no longer. Returns None if it is not served."""
        self.find(name)
        with self._changing() as book:
            adapter = book.adapters.pop(name, None)
            book.broken.pop(name, None)
            if name in book.fixed:
                book.fixed.remove(name)
            if adapter is not None:
                book.removed.append(name)
        return adapter

    def _is_inside(self, folder: Path) -> bool:
        if self._root is None:
            return False
        return Path(os.path.realpath(self._root)) in Path(os.path.realpath(folder)).parents

    def _current(self) -> _Book:
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                number = self._file.stat().st_mtime_ns
                if number != self._number:
                    self._book = msgspec.json.decode(self._file.read_bytes(), type=_Book)
                    self._number = number
        return self._book

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Book]:
        """Let one process at a time change the book."""
        if self._file is None:
            yield self._book
            return
        with self._file.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            book = self._current()
            yield book
            written = self._file.with_suffix(".new")
            written.write_bytes(msgspec.json.encode(book))
            # A number, not the time: two changes within a tick of the clock have the same.
            self._number += 1
            os.utime(written, ns=(self._number, self._number))
            os.replace(written, self._file)
