"""Parse GGUF files: metadata, and the names, types, shapes and places of tensors.

A file is a magic number, the version, the numbers of tensors and of metadata entries, these
entries, a description of each tensor, and the tensors' bytes, aligned
(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). All numbers are little-endian. No size
is trusted before it was compared with the file's."""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

from toolkit.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**20
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors: blocks of consecutive columns."""

    name: str
    block: int  # columns
    num_bytes: int  # of a block

    @property
    def is_quantized(self) -> bool:
        return self.block > 1

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.num_bytes / self.block


TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    20: TensorType("IQ4_NL", 32, 18),
    23: TensorType("IQ4_XS", 256, 136),
    30: TensorType("BF16", 1, 2),
    39: TensorType("MXFP4", 32, 17),
}
"""Types that tk reads, by their number in files."""
_OTHER_TYPES = {
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    21: "IQ3_S",
    22: "IQ2_S",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


_MIXTURES = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    21: "Q2_K_S",
    25: "IQ4_NL",
    30: "IQ4_XS",
    32: "BF16",
    38: "MXFP4_MOE",
}
"""Names of `general.file_type`, as in the names of files (llama.cpp, include/llama.h): most tensors
of a Q4_K_M are Q4_K, and the largest ones may be Q6_K or Q8_0."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """A tensor in a GGUF file."""

    file: Path
    name: str  # llama.cpp's
    type: TensorType
    shape: tuple[int, ...]  # rows first, as in PyTorch
    start: int  # offset of the first byte in the file
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Array:
    """An array in the metadata, parsed when it is read."""

    file: Path
    kind: int
    count: int
    start: int  # offset in the file

    def read(self) -> list[Any]:
        with _mapped(self.file) as content:
            if self.kind != _STRING:
                kind = f"<{self.count}{_FORMATS[self.kind]}"
                return list(struct.unpack_from(kind, content, self.start))
            length_at, position, texts = struct.Struct("<Q").unpack_from, self.start, []
            for _ in range(self.count):
                end = position + 8 + length_at(content, position)[0]
                texts.append(content[position + 8 : end])
                position = end
            return [text.decode(errors="replace") for text in texts]


@dataclass(frozen=True, slots=True)
class GGUF:
    """A model's file, or its files if it is split."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]  # of the first file; arrays are `Array`s
    tensors: tuple[GGUFTensor, ...]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return a metadata value; `default` if there is none.

        Raises CheckpointError if it has another type. An array is a list."""
        value = self.metadata.get(key, default)
        if isinstance(value, Array):
            value = value.read()
        if value is not default and (
            not isinstance(value, kind) or (isinstance(value, bool) and kind is int)
        ):
            _fail(self.files[0], f"has {key} {value!r:.60}, which has the wrong type")
        return value

    @property
    def mixture(self) -> str | None:
        """Name of the mixture of types, such as Q4_K_M; None if the file does not say."""
        return _MIXTURES.get(self.get("general.file_type", int, -1))


def read_gguf(path: Path) -> GGUF:
    """Read the headers of a model: of the file, and of the others if it is split.

    Raises CheckpointError if a file is missing, cut short, or not valid."""
    files = split_files(path)
    try:
        stats = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}.") from None
    return _read_model(files, stats)


def split_files(path: Path) -> tuple[Path, ...]:
    """Return the files of a model by one of them. Raises CheckpointError if some are missing."""
    names = split_names(path.name)
    files = tuple(path.with_name(name) for name in names)
    missing = [file.name for file in files if not file.is_file()]
    if missing and len(files) > 1:
        raise CheckpointError(
            f"{path} is one of {len(files)} files, and {path.parent} lacks "
            f"{', '.join(missing[:3])}{', …' * (len(missing) > 3)}. Fetch the others too."
        )
    return files


def split_names(name: str) -> list[str]:
    """Return the names of all files of a model by the name of one."""
    match = _SPLIT.fullmatch(name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return [name]
    return [f"{match[1]}-{i:05}-of-{match[3]}.gguf" for i in range(1, int(match[3]) + 1)]


@lru_cache(maxsize=8)
def _read_model(files: tuple[Path, ...], stats: tuple[tuple[int, int], ...]) -> GGUF:
    """Read the headers of files. `stats`: times and sizes, for the cache."""
    parts = [_read_file(file) for file in files]
    metadata = parts[0][0]
    tensors = tuple(tensor for _, own in parts for tensor in own)
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        _fail(files[0], f"has the tensor {twice} twice")
    for file, (own, _) in zip(files, parts, strict=True):
        count = own.get("split.count", 1) or 1
        if count != len(files):
            _fail(file, f"is one of {count} files by its metadata, and of {len(files)} by its name")
    total = metadata.get("split.tensors.count")
    if len(files) > 1 and isinstance(total, int) and total != len(tensors):
        _fail(files[0], f"says that the model has {total} tensors; its files have {len(tensors)}")
    return GGUF(files, metadata, tensors)


def _read_file(file: Path) -> tuple[dict[str, Any], list[GGUFTensor]]:
    with _mapped(file) as content:
        try:
            return _parse(file, content)
        except (struct.error, OverflowError):
            _fail(file, f"is cut short: it has {len(content)} bytes")


class _mapped:  # noqa: N801  # a context manager that is used like a function
    """Maps a file into memory. Raises CheckpointError if it cannot be read."""

    def __init__(self, file: Path) -> None:
        try:
            with file.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            _fail(file, "is empty")
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error}.") from None

    def __enter__(self) -> mmap.mmap:
        return self._map

    def __exit__(self, *_: object) -> None:
        self._map.close()


class _Cursor:
    """A position in a file's bytes. Reading past the end raises CheckpointError or struct.error."""

    def __init__(self, file: Path, content: mmap.mmap, position: int = 0) -> None:
        self._file, self._content, self.position = file, content, position

    @property
    def left(self) -> int:
        return len(self._content) - self.position

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{count}{kind}", self._content, self.position)
        self.position += struct.calcsize(f"<{count}{kind}")
        return found

    def number(self, kind: str) -> Any:
        return self.numbers(kind, 1)[0]

    def text(self) -> str:
        length = self.number("Q")
        if length > self.left:
            _fail(self._file, f"is cut short: a text of {length} bytes has {self.left} left")
        begin = self.position
        self.position += length
        return self._content[begin : self.position].decode(errors="replace")

    def value(self) -> Any:
        """Read a metadata value after its type. An array is skipped."""
        kind = self.number("I")
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(self._format(kind))
        kind, count = self.number("I"), self.number("Q")
        array = Array(self._file, kind, count, self.position)
        self._skip(array)
        return array

    def _skip(self, array: Array) -> None:
        if array.kind != _STRING:
            size = struct.calcsize(self._format(array.kind))
            if array.count * size > self.left:
                _fail(
                    self._file,
                    f"is cut short: an array of {array.count} numbers has {self.left} bytes left",
                )
            self.position += array.count * size
            return
        if 8 * array.count > self.left:
            _fail(
                self._file,
                f"is cut short: an array of {array.count} texts has {self.left} bytes left",
            )
        length_at, content, position = struct.Struct("<Q").unpack_from, self._content, self.position
        for _ in range(array.count):  # a text past the end fails here, at the next length
            position += 8 + length_at(content, position)[0]
        self.position = position
        if self.left < 0:
            _fail(self._file, f"is cut short: it has {len(content)} bytes")

    def _format(self, kind: int) -> str:
        if kind not in _FORMATS:
            _fail(self._file, f"has metadata of the unknown type {kind}")
        return _FORMATS[kind]


def _parse(file: Path, content: mmap.mmap) -> tuple[dict[str, Any], list[GGUFTensor]]:
    cursor = _Cursor(file, content)
    if content[:4] != _MAGIC:
        _fail(file, "is not a GGUF file")
    cursor.position = 4
    version = cursor.number("I")
    if version not in _VERSIONS:
        is_swapped = version.to_bytes(4, "little") in [v.to_bytes(4, "big") for v in _VERSIONS]
        kind = "a big-endian file" if is_swapped else f"version {version}"
        raise CheckpointError(
            f"{file} is {kind} of GGUF. tk reads versions 2 and 3, little-endian. Convert the "
            f"model again with a current version of llama.cpp."
        )
    num_tensors, num_values = cursor.numbers("Q", 2)
    for count, least, noun in ((num_tensors, 24, "tensors"), (num_values, 13, "metadata entries")):
        if count * least > cursor.left:
            _fail(file, f"is cut short: it says {count} {noun}, and has {len(content)} bytes")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.text()
        if key in metadata:
            _fail(file, f"has the metadata entry {key} twice")
        metadata[key] = cursor.value()
    described = [_describe(file, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if (
        not isinstance(alignment, int)
        or not 0 < alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        _fail(file, f"has general.alignment {alignment!r}, which is not a power of two")
    data = -(-cursor.position // alignment) * alignment
    tensors = [
        GGUFTensor(file, name, kind, shape, data + offset, num_bytes)
        for name, kind, shape, offset, num_bytes in described
    ]
    _check_places(file, tensors, alignment, len(content))
    return metadata, tensors


def _describe(file: Path, cursor: _Cursor) -> tuple[str, TensorType, tuple[int, ...], int, int]:
    """Return (name, type, shape, offset, number of bytes) of a tensor."""
    name = cursor.text()
    num_dimensions = cursor.number("I")
    if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        _fail(file, f"says that {name} has {num_dimensions} dimensions")
    shape = cursor.numbers("Q", num_dimensions)[::-1]
    number, offset = cursor.number("I"), cursor.number("Q")
    kind = TYPES.get(number)
    if kind is None:
        shown = _OTHER_TYPES.get(number, f"number {number}")
        listed = ", ".join(one.name for one in TYPES.values())
        raise CheckpointError(
            f"{file}: {name} has the unsupported type {shown}. Supported: {listed}. Use a file of "
            f"one of these types, such as Q4_K_M or Q8_0."
        )
    if not all(shape) or shape[-1] % kind.block:
        _fail(
            file,
            f"says that {name} has the shape {list(shape)}; {kind.name} needs columns in blocks of "
            f"{kind.block}",
        )
    return name, kind, shape, offset, math.prod(shape) // kind.block * kind.num_bytes


def _check_places(file: Path, tensors: Sequence[GGUFTensor], alignment: int, size: int) -> None:
    """Raise CheckpointError if tensors overlap, or are outside the file."""
    end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.start):
        if tensor.start + tensor.num_bytes > size:
            _fail(
                file,
                f"is cut short, or wrong about sizes: {tensor.name} ends at byte "
                f"{tensor.start + tensor.num_bytes} of {size}",
            )
        if tensor.start < end or tensor.start % alignment:
            _fail(file, f"has {tensor.name} at a wrong place (byte {tensor.start})")
        end = tensor.start + tensor.num_bytes


def _fail(file: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{file} {problem}. Fetch or copy it again.")
