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
    ToolkitError,
)
from toolkit.hub import locate_adapter
from toolkit.lora.files import CONFIG, find_adapter
from toolkit.sequence import Adapter, LoRARequest

_NAME = re.compile(r"[\w.\-]+")  # of a folder in --lora-dir
MAX_NAME = 256  # characters


def with_local_adapters(config: EngineConfig) -> EngineConfig:
    """Return the settings of an engine's processes: adapters are folders. Downloads missing ones.

    Raises ToolkitError."""
    if not config.lora.adapters:
        return config
    modules = []
    for name, path in config.lora.adapters.items():
        try:
            folder = str(locate_adapter(path).absolute())
        except ToolkitError as error:
            raise type(error)(f"adapter {name!r}: {error.message}") from None
        modules.append(msgspec.json.encode({"name": name, "path": folder}).decode())
    return dataclasses.replace(
        config, lora=dataclasses.replace(config.lora, lora_modules=tuple(modules))
    )


class _Book(msgspec.Struct):
    """Adapters by name."""

    adapters: dict[str, Adapter] = {}
    removed: list[str] = []  # of --lora-modules and --lora-dir, until they are loaded again


class AdapterRegistry:
    """The adapters of a front end. Several processes that serve one model share a file of them.

    The file is replaced as a whole, so that all processes know an adapter from the same moment on,
    also one that starts later."""

    def __init__(self, config: LoRAConfig, file: Path | None = None) -> None:
        self._config, self._file = config, file
        self._root = None if config.lora_dir is None else Path(config.lora_dir).expanduser()
        self._book, self._read_at = _Book(), 0

    def start(self, adapters: Sequence[Adapter]) -> None:
        """Add the adapters of --lora-modules, which the engine has read."""
        with self._changing() as book:
            for adapter in adapters:
                if adapter.name not in book.removed:
                    book.adapters.setdefault(adapter.name, adapter)

    @property
    def names(self) -> list[str]:
        """Names that requests may use. Those of folders in --lora-dir come last."""
        names = list(self._current().adapters)
        if self._root is not None and self._root.is_dir():
            folders = sorted(self._root.glob(f"*/{CONFIG}"))
            names += [one.parent.name for one in folders if one.parent.name not in names]
        return [name for name in names if name not in self._current().removed]

    @property
    def loaded(self) -> list[Adapter]:
        """Adapters that have been found so far."""
        return list(self._current().adapters.values())

    def find(self, name: str) -> Adapter | None:
        """Return the adapter of this name, None if there is none."""
        book = self._current()
        if name in book.adapters:
            return book.adapters[name]
        if self._root is None or name in book.removed or not _NAME.fullmatch(name):
            return None
        folder = self._root / name
        if not (folder / CONFIG).is_file() or not self._is_inside(folder):
            return None
        with contextlib.suppress(CheckpointError):
            self.put(find_adapter(name, folder))
        return self._current().adapters.get(name)

    def resolve(self, request: LoRARequest | None) -> Adapter | None:
        """Return the adapter that a request of `LLM` brings. Raises InvalidRequestError."""
        if request is None:
            return None
        if not self._config.is_enabled:
            raise InvalidRequestError(
                "This engine takes no LoRA adapters. Set enable_lora=True.", param="lora_request"
            )
        if request.lora_path:
            folder = Path(request.lora_path).expanduser()
            try:
                adapter = find_adapter(request.lora_name, folder)
            except CheckpointError as error:
                raise InvalidRequestError(error.message, param="lora_request") from None
            if self._current().adapters.get(adapter.name) != adapter:
                self.put(adapter)
            return adapter
        found = self.find(request.lora_name)
        if found is None:
            known = ", ".join(map(repr, self.names)) or "none"
            raise InvalidRequestError(
                f"There is no adapter {request.lora_name!r}. Known: {known}. A LoRARequest with a "
                f"lora_path adds one.",
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
        root = self._root or Path()
        if path in self._config.adapters.values():
            folder = locate_adapter(path)
        elif not self._is_inside(folder := root / Path(path).expanduser()):
            allowed = (
                "Without --lora-dir, only those of --lora-modules can be loaded again"
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
        """Serve an adapter, in place of another revision of it."""
        with self._changing() as book:
            book.adapters[adapter.name] = adapter
            if adapter.name in book.removed:
                book.removed.remove(adapter.name)

    def remove(self, name: str) -> Adapter | None:
        """Serve an adapter no longer. Returns None if it is not served."""
        self.find(name)
        with self._changing() as book:
            adapter = book.adapters.pop(name, None)
            if adapter is not None:
                book.removed.append(name)
        return adapter

    def _is_inside(self, folder: Path) -> bool:
        if self._root is None:
            return False
        root, folder = self._root.resolve(), folder.resolve()
        return root in folder.parents

    def _current(self) -> _Book:
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                changed_at = self._file.stat().st_mtime_ns
                if changed_at != self._read_at:
                    self._book = msgspec.json.decode(self._file.read_bytes(), type=_Book)
                    self._read_at = changed_at
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
            os.replace(written, self._file)
            self._read_at = self._file.stat().st_mtime_ns
