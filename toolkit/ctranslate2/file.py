"""Parse CTranslate2's `model.bin`: the names, types, shapes and places of variables.

A file is the format's version, the name of the layout and its revision, the variables, each with
its bytes, and aliases of variables (https://github.com/OpenNMT/CTranslate2,
python/ctranslate2/specs/model_spec.py). All numbers are little-endian. No size is trusted before it
was compared with the file's."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import CheckpointError

MODEL_FILE = "model.bin"
_VERSIONS = (4, 5, 6)
_MAX_VERSION = 100  # in a header; larger numbers are another format
_MAX_VARIABLES = 2**16
_MAX_DIMENSIONS = 4
_LAYOUT = b"Spec\0"  # the end of a layout's name
_MAX_LAYOUT = 64  # bytes of its name
_TYPES = (("F32", 4), ("I8", 1), ("I16", 2), ("I32", 4), ("F16", 2), ("BF16", 2))
"""Names, as in safetensors, and sizes of types, by their number in files."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A tensor or a number in a file."""

    kind: str  # type, as safetensors names it
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    num_bytes: int
    content: bytes  # of a number; empty for a tensor

    @property
    def number(self) -> int:
        """Value of an integer."""
        return int.from_bytes(self.content, "little", signed=True)


@dataclass(frozen=True, slots=True)
class Model:
    """Content of a `model.bin`."""

    file: Path
    layout: str  # CTranslate2's name, such as WhisperSpec
    variables: Mapping[str, Variable]
    aliases: Mapping[str, str]  # variables by other names; these are in `variables` too

    def error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file} {problem}.")


def is_ctranslate2(folder: Path) -> bool:
    """Return True for a folder whose `model.bin` begins as CTranslate2's do."""
    file = folder / MODEL_FILE
    if not file.is_file():
        return False
    try:
        with file.open("rb") as stream:
            begin = stream.read(6 + _MAX_LAYOUT)
    except OSError:
        return False
    if len(begin) < 6:
        return False
    version, length = struct.unpack_from("<IH", begin)
    return version < _MAX_VERSION and begin[6 : 6 + length].endswith(_LAYOUT)


def read_model(folder: Path) -> Model:
    """Read a folder's `model.bin`. Raises CheckpointError if it is cut short or not valid."""
    file = folder / MODEL_FILE
    try:
        found = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
    return _read(file, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=8)
def _read(file: Path, time: int, size: int) -> Model:
    """Read a file. `time`, `size`: for the cache."""
    try:
        with (
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            return _parse(_Cursor(file, content))
    except struct.error:
        _fail(file, f"is cut short: it has {size} bytes")
    except ValueError:  # of a mapping
        _fail(file, "is empty")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None


class _Cursor:
    """A position in a file's bytes. Reading past the end raises CheckpointError or struct.error."""

    def __init__(self, file: Path, content: mmap.mmap) -> None:
        self.file, self._content, self.position = file, content, 0

    @property
    def left(self) -> int:
        return len(self._content) - self.position

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{kind}", self._content, self.position)
        self.position += struct.calcsize(f"<{count}{kind}")
        return found

    def number(self, kind: str) -> int:
        return int(self.numbers(kind, 1)[0])

    def take(self, length: int) -> bytes:
        if length > self.left:
            _fail(self.file, f"is cut short: {length} bytes have {self.left} left")
        self.position += length
        return self._content[self.position - length : self.position]

    def text(self) -> str:
        raw = self.take(self.number("H"))
        if not raw.endswith(b"\0"):
            _fail(self.file, f"is not valid: it has the name {raw[:40]!r} without an end")
        return raw[:-1].decode(errors="backslashreplace")

    def variable(self, name: str) -> Variable:
        num_dimensions = self.number("B")
        if num_dimensions > _MAX_DIMENSIONS:
            _fail(self.file, f"says that {name} has {num_dimensions} dimensions")
        shape = self.numbers("I", num_dimensions)
        number, num_bytes = self.number("B"), self.number("I")
        if number >= len(_TYPES):
            listed = ", ".join(kind for kind, _ in _TYPES)
            raise CheckpointError(
                f"{self.file}: {name} has the unsupported type {number}. Supported: {listed}. "
                f"Convert the model again, with the quantization float16 or int8."
            )
        kind, size = _TYPES[number]
        if not all(shape) or math.prod(shape) * size != num_bytes:
            _fail(
                self.file,
                f"says that {name} has {num_bytes} bytes and the shape {list(shape)} in {kind}",
            )
        if num_bytes > self.left:
            _fail(self.file, f"is cut short: {name} has {self.left} bytes of {num_bytes}")
        start = self.position
        self.position += num_bytes
        content = b"" if shape else self._content[start : self.position]
        return Variable(kind, shape, start, num_bytes, content)


def _parse(cursor: _Cursor) -> Model:
    file, version = cursor.file, cursor.number("I")
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{file} has version {version} of CTranslate2's format. tk reads the versions "
            f"{_VERSIONS[0]} to {_VERSIONS[-1]}. Convert the model again with CTranslate2 4."
        )
    layout = cursor.text()
    cursor.number("I")  # the layout's revision
    variables: dict[str, Variable] = {}
    for _ in range(_count(cursor)):
        name = cursor.text()
        if name in variables:
            _fail(file, f"has the variable {name} twice")
        variables[name] = cursor.variable(name)
    aliases = {cursor.text(): cursor.text() for _ in range(_count(cursor))}
    for name, other in aliases.items():
        if name in variables or other not in variables:
            _fail(file, f"has the name {name} for the variable {other}, which it cannot have")
    if cursor.left:
        _fail(file, f"has {cursor.left} bytes after its end")
    variables |= {name: variables[other] for name, other in aliases.items()}
    return Model(file, layout, variables, aliases)


def _count(cursor: _Cursor) -> int:
    count = cursor.number("I")
    if count > _MAX_VARIABLES:
        _fail(cursor.file, f"says that it has {count} variables or names")
    return count


def _fail(file: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{file} {problem}. Fetch or copy it again.")
