"""Reader of safetensors files, in chunks with read-ahead: the host never holds a second copy.

A file is the length of its header in eight bytes, the header in JSON, and the tensors' bytes in
row-major order (https://huggingface.co/docs/safetensors)."""

from __future__ import annotations

import math
import mmap
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import msgspec
import torch

from toolkit.distributed import Shard
from toolkit.errors import CheckpointError
from toolkit.weights.loading.progress import Progress
from toolkit.weights.slots import Slot

READERS = 8  # threads that read for a GPU; each holds one chunk
CHUNK = 2**22  # bytes that a reader reads at a time
MAPPED_CHUNK = 2**24
"""Bytes of a file mapped at a time. Pages that were read count as this process's memory."""
MAPPED_AHEAD = 4  # chunks that the system reads ahead of the copy
MOST_NUMBERS = 2**59  # of a tensor, so that PyTorch can count its bytes
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, or a region of it; not read yet."""

    file: Path
    name: str
    kind: str  # data type, as the format names it
    shape: tuple[int, ...]
    start: int  # offset of the first byte in the file
    num_bytes: int  # from the start of the first row to the end of the last
    columns: Shard | None = None  # entries of each row; None: all
    others: tuple[Shard, ...] = ()  # entries of the dimensions after the columns

    def part(self, region: Sequence[Shard]) -> StoredTensor:
        """Return a region of the tensor."""
        if not region or all(shard.is_full for shard in region):
            return self
        rows, *others = region
        return replace(
            self,
            shape=tuple(shard.count for shard in region),
            start=self.start + rows.begin * self.row_bytes,
            num_bytes=rows.count * self.row_bytes,
            columns=None if all(shard.is_full for shard in others) else others[0],
            others=tuple(others[1:]),
        )

    @property
    def dtype(self) -> torch.dtype:
        """PyTorch's type. Raises CheckpointError for an unsupported one."""
        if self.kind not in DTYPES:
            raise CheckpointError(
                f"{self.file}: {self.name} has the unsupported type {self.kind}. Supported: "
                f"{', '.join(DTYPES)}."
            )
        return DTYPES[self.kind]

    def slot_for(self, slot: Slot) -> Slot:
        """Return the destination of the tensor as it is stored. `slot`: of its plain values."""
        return slot

    def view(self, content: memoryview) -> torch.Tensor:
        """Return the tensor in the content of its file, without a copy if it is aligned."""
        dtype, start = self.dtype, self.start
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=dtype, device="cpu")
        if start % dtype.itemsize:
            content, start = memoryview(bytearray(content[start : start + self.num_bytes])), 0
        count = self.num_bytes // dtype.itemsize
        return torch.frombuffer(content, dtype=dtype, count=count, offset=start).view(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.num_bytes // self.shape[0] if self.shape and self.shape[0] else self.num_bytes

    @property
    def read_columns(self) -> Shard | None:
        """Elements of each row that are read; None: all."""
        return self.columns

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row as it is read."""
        return self.shape[1:]

    @property
    def num_read_bytes(self) -> int:
        """Size of what is read of all rows."""
        num_rows = self.shape[0] if self.shape else 1
        return num_rows * math.prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rows of a tensor."""

    tensor: StoredTensor
    first: int
    count: int

    def read(self, buffer: torch.Tensor) -> torch.Tensor:
        """Read the rows into `buffer` (bytes)."""
        if self.tensor.columns is not None:  # a mapping reads only the pages of these columns
            mapped = self.map()
            return buffer[: mapped.nbytes].view(mapped.dtype).view(mapped.shape).copy_(mapped)
        target = buffer[: self._num_bytes]
        with self.tensor.file.open("rb") as stream:
            stream.seek(self._start)
            if stream.readinto(target.numpy().data) != self._num_bytes:
                raise CheckpointError(f"{self.tensor.file} was truncated while it was read.")
        return target.view(self.tensor.dtype).view(self._shape)

    def map(self) -> torch.Tensor:
        """Map the rows into memory. The system starts to read them."""
        page = self._start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        before = self._start - page
        with self.tensor.file.open("rb") as stream:
            mapped = mmap.mmap(
                stream.fileno(), before + self._num_bytes, access=mmap.ACCESS_COPY, offset=page
            )
        if hasattr(mmap, "MADV_WILLNEED") and self.tensor.columns is None:
            mapped.madvise(mmap.MADV_WILLNEED)
        rows = torch.frombuffer(mapped, dtype=self.tensor.dtype, offset=before)
        columns = self.tensor.read_columns
        if columns is None:
            return rows.view(self._shape)
        cut = (columns, *self.tensor.others)
        part = rows.view(self.count, *(shard.total for shard in cut))
        for dim, shard in enumerate(cut, 1):
            part = part.narrow(dim, shard.begin, shard.count)
        return part

    @property
    def _start(self) -> int:
        return self.tensor.start + self.first * self.tensor.row_bytes

    @property
    def _num_bytes(self) -> int:
        return self.count * self.tensor.row_bytes

    @property
    def _shape(self) -> tuple[int, ...]:
        return self.count, *self.tensor.row_shape


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of a file, in the header's order.

    Raises CheckpointError if it is cut short or not a safetensors file."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            begin = stream.read(8)
            if len(begin) == 8 and (header_size := struct.unpack("<Q", begin)[0]) <= size - 8:
                begin += stream.read(header_size)
    except OSError as error:
        raise _bad(file, f"cannot be read ({error})") from None
    return parse_header(file, begin, size)


def parse_header(
    file: Path, content: bytes | memoryview, size: int | None = None
) -> list[StoredTensor]:
    """Return the tensors of a file whose content begins so, in the header's order.

    size: bytes of the file, if it is longer. Raises CheckpointError as `read_header` does."""
    size = len(content) if size is None else size
    try:
        (header_size,) = struct.unpack_from("<Q", content)
        if header_size > size - 8:
            raise _bad(file, f"is cut short or not a safetensors file: it has {size} bytes")
        header = msgspec.json.decode(content[8 : 8 + header_size])  # refuses what is no Unicode
        tensors = list(_tensors(file, header, 8 + header_size))
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _bad(file, "is not a valid safetensors file: its header cannot be read") from None
    expected = max((tensor.start + tensor.num_bytes for tensor in tensors), default=0)
    if size < expected:
        raise _bad(file, f"is cut short: it has {size} bytes of {expected}")
    return tensors


def read_into(
    tensors: Sequence[tuple[StoredTensor, Slot]], stop: threading.Event | None = None
) -> None:
    """Read each tensor into its slot, which has its shape. Once `stop` is set, skip the rest.

    Raises CheckpointError if a file cannot be read."""
    try:
        if any(slot.target.is_cuda for _, slot in tensors):
            read_buffered(tensors, stop, pinned=True)
        else:
            read_mapped(tensors, stop)
    except OSError as error:
        raise CheckpointError(
            f"The weights in {tensors[0][0].file.parent} cannot be read: {error}."
        ) from None


def read_mapped(
    tensors: Sequence[tuple[StoredTensor, Slot]], stop: threading.Event | None = None
) -> None:
    """Read for a CPU: PyTorch's threads copy from the mapped files in parallel."""
    ahead: deque[tuple[torch.Tensor, Slot]] = deque()

    def copy_one() -> None:
        rows, slot = ahead.popleft()
        slot.fill(rows)

    for chunk, slot in _chunks(tensors, MAPPED_CHUNK, stop):
        ahead.append((chunk.map(), slot))
        if len(ahead) > MAPPED_AHEAD:
            copy_one()
    while ahead:
        copy_one()


def read_buffered(
    tensors: Sequence[tuple[StoredTensor, Slot]],
    stop: threading.Event | None = None,
    *,
    pinned: bool,
) -> None:
    """Read for a GPU: threads read into a few pinned buffers, and this thread starts the copies.

    A single thread reads even a cached file at only a fraction of the bus's speed."""
    size = max(
        [
            CHUNK,
            *(
                tensor.num_bytes if slot.needs_all_rows else tensor.row_bytes
                for tensor, slot in tensors
            ),
        ]
    )
    pending: deque[tuple[Future[torch.Tensor], Slot, torch.Tensor]] = deque()

    def finish_one() -> torch.Tensor:
        rows, slot, buffer = pending.popleft()
        slot.fill(rows.result())
        return buffer

    with ThreadPoolExecutor(READERS, "weights") as pool:
        for chunk, slot in _chunks(tensors, size, stop):
            if len(pending) == READERS:
                buffer = finish_one()
            else:
                buffer = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)
            pending.append((pool.submit(chunk.read, buffer), slot, buffer))
        while pending:
            finish_one()


def _chunks(
    tensors: Sequence[tuple[StoredTensor, Slot]], size: int, stop: threading.Event | None
) -> Iterator[tuple[_Chunk, Slot]]:
    """Split tensors into runs of rows of at most `size` bytes, or of one row, with their slots."""
    progress = Progress(sum(tensor.num_read_bytes for tensor, _ in tensors))
    for tensor, slot in tensors:
        num_rows = tensor.shape[0] if tensor.shape else 1
        step = max(1, num_rows if slot.needs_all_rows else size // max(1, tensor.row_bytes))
        for first in range(0, num_rows, step):
            if stop is not None and stop.is_set():
                return
            count = min(step, num_rows - first)
            yield _Chunk(tensor, first, count), slot.rows(first, count)
            progress.add(tensor.num_read_bytes * count // num_rows)


def _tensors(file: Path, header: dict[str, Any], data: int) -> Iterator[StoredTensor]:
    """Yield the tensors in a header. `data`: offset of the tensors' bytes in the file."""
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape = entry["dtype"], tuple(map(index, entry["shape"]))
        begin, end = map(index, entry["data_offsets"])
        if not 0 <= begin <= end or min(shape, default=0) < 0:
            raise ValueError(f"{name}: invalid offsets or shape")
        if math.prod(size or 1 for size in shape) > MOST_NUMBERS:  # also next to a size of 0
            raise ValueError(f"{name}: too large")
        if kind in DTYPES and math.prod(shape) * DTYPES[kind].itemsize != end - begin:
            raise ValueError(f"{name}: size and shape differ")
        yield StoredTensor(file, name, kind, shape, data + begin, end - begin)


def _bad(file: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{file} {problem}. Fetch or copy it again.")
