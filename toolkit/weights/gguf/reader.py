"""The tensors of GGUF files, under the names of the original checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from toolkit.distributed import Shard, full_shard
from toolkit.errors import CheckpointError
from toolkit.gguf.config import HeadsInTurn, NamedTensor, named_tensors
from toolkit.gguf.file import TYPES, read_gguf
from toolkit.weights.gguf.decode import dequantize
from toolkit.weights.loading.collected import CollectedSlot
from toolkit.weights.loading.safetensors import DTYPES, StoredTensor
from toolkit.weights.slots import Slot
from toolkit.weights.source import pairs_apart

_BLOCKS = {kind.name: kind for kind in TYPES.values() if kind.is_quantized}


@dataclass(frozen=True, slots=True)
class GGUFStored(StoredTensor):
    """A tensor in a GGUF file. If its type is quantized, it is read as its bytes in rows.

    `shape` and `columns` count entries, also then. `columns` is in whole blocks."""

    pairs: int = 0
    """Head size, if the rows of each head are ordered to rotate adjacent pairs, else 0."""
    added: float = 0.0  # what the converter added to the tensor
    heads: HeadsInTurn | None = None
    is_decay: bool = False  # the file has -exp of the tensor
    chosen: tuple[int, ...] | None = None
    """The part's rows or columns among those that are read, if its heads are in turn."""
    skipped: int = 0
    """Columns of the first block that are read, since blocks are not cut, and not in the part."""
    num_decoded: int = 0  # columns of the blocks that are read; 0: those of the shape

    @property
    def is_quantized(self) -> bool:
        return self.kind in _BLOCKS

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.is_quantized else DTYPES[self.kind]

    @property
    def read_columns(self) -> Shard | None:
        """Elements of each row that are read; None: all. Bytes if the type is quantized."""
        if self.columns is None or not self.is_quantized:
            return self.columns
        kind = _BLOCKS[self.kind]
        counts = (self.columns.total, self.columns.begin, self.columns.count)
        return Shard(*(count // kind.block * kind.num_bytes for count in counts))

    @property
    def row_shape(self) -> tuple[int, ...]:
        if not self.is_quantized:
            return self.shape[1:]
        return (self.row_bytes if self.read_columns is None else self.read_columns.count,)

    def slot_for(self, slot: Slot) -> Slot:
        return slot_of(self, slot)

    def part(self, region: Sequence[Shard]) -> StoredTensor:
        """Return a region: any rows, and any columns. Blocks are read whole: see `skipped`."""
        if self.heads is not None and self.chosen is None and region:
            dim, shard = self.heads.dim, region[self.heads.dim]
            chosen = self.heads.order[shard.begin : shard.begin + shard.count]
            if chosen != list(range(shard.begin, shard.begin + shard.count)):
                region = (*region[:dim], full_shard(shard.total), *region[dim + 1 :])
                return replace(self, chosen=tuple(chosen)).part(region)
        if not self.is_quantized or len(region) < 2 or region[1].is_full:
            return StoredTensor.part(self, region)
        block, (rows, columns) = _BLOCKS[self.kind].block, region
        begin = columns.begin // block * block
        end = -(-(columns.begin + columns.count) // block) * block
        whole = Shard(columns.total, begin, end - begin)
        part = StoredTensor.part(self, (rows, whole))
        assert isinstance(part, GGUFStored)
        shape, skipped = (rows.count, columns.count), columns.begin - begin
        return replace(part, shape=shape, skipped=skipped, num_decoded=whole.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingSlot(Slot):
    """Destination of the bytes of a quantized type, which are decoded to plain values."""

    inner: Slot
    kind: str
    columns: int  # of the blocks
    kept: slice  # columns for `inner`

    @property
    def needs_all_rows(self) -> bool:
        return self.inner.needs_all_rows

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype == torch.uint8

    def rows(self, first: int, count: int) -> Slot:
        inner = self.inner.rows(first, count)
        return replace(self, target=inner.target, inner=inner)

    def fill(self, tensor: torch.Tensor) -> None:
        raw = tensor.to(self.target.device)
        self.inner.fill(dequantize(self.kind, raw, self.columns)[:, self.kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedRowsSlot(Slot):
    """Destination of whole heads whose rows are ordered to rotate adjacent pairs.

    The rows of each head, plain or in bytes, are put in the original order, for halves."""

    inner: Slot
    head_size: int

    @property
    def needs_all_rows(self) -> bool:
        return True

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.inner.accepts(dtype)

    def rows(self, first: int, count: int) -> Slot:
        return self

    def fill(self, tensor: torch.Tensor) -> None:
        order = torch.tensor(pairs_apart(self.head_size), device=tensor.device)
        heads = tensor.reshape(-1, self.head_size, *tensor.shape[1:])
        self.inner.fill(heads[:, order].flatten(0, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSlot(Slot):
    """Destination of some rows (dim 0) or columns (dim 1) of what is read, in this order."""

    inner: Slot
    chosen: tuple[int, ...]
    dim: int

    @property
    def needs_all_rows(self) -> bool:
        return True

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.inner.accepts(dtype)

    def rows(self, first: int, count: int) -> Slot:
        return self

    def fill(self, tensor: torch.Tensor) -> None:
        chosen = torch.tensor(self.chosen, device=tensor.device)
        self.inner.fill(tensor.index_select(self.dim, chosen))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecaySlot(Slot):
    """Destination of the logarithm of a decay, of which the file has the negative."""

    inner: Slot

    @property
    def needs_all_rows(self) -> bool:
        return self.inner.needs_all_rows

    def rows(self, first: int, count: int) -> Slot:
        inner = self.inner.rows(first, count)
        return replace(self, target=inner.target, inner=inner)

    def fill(self, tensor: torch.Tensor) -> None:
        self.inner.fill(tensor.float().neg().log())


def read_header(file: Path) -> list[StoredTensor]:
    """Return the tensors of a model's GGUF file or files. The kind is GGUF's name of the type.

    Raises CheckpointError if a file is wrong, or its architecture unsupported."""
    return [_stored(named) for named in named_tensors(read_gguf(file))]


def slot_of(tensor: StoredTensor, slot: Slot) -> Slot:
    """Return the destination of a part of a tensor, so that the converter's changes are undone.

    `slot`: destination of the original part, in plain values."""
    assert isinstance(tensor, GGUFStored)
    if tensor.added:
        slot = replace(slot, offset=slot.offset - tensor.added)
    if tensor.is_decay:
        slot = DecaySlot(slot.target, inner=slot)
    chosen, dim = tensor.chosen, tensor.heads.dim if tensor.heads else 0
    if chosen is not None and dim and not isinstance(slot, CollectedSlot):
        slot = ChosenSlot(slot.target, inner=slot, chosen=chosen, dim=dim)
    if tensor.is_quantized and not isinstance(slot, CollectedSlot):
        kept = slice(tensor.skipped, tensor.skipped + tensor.shape[-1])
        columns = tensor.num_decoded or tensor.shape[-1]
        slot = DecodingSlot(slot.target, inner=slot, kind=tensor.kind, columns=columns, kept=kept)
    if chosen is not None and not dim:
        slot = ChosenSlot(slot.target, inner=slot, chosen=chosen, dim=dim)
    if tensor.pairs:
        slot = PairedRowsSlot(slot.target, inner=slot, head_size=tensor.pairs)
    return slot


def _stored(named: NamedTensor) -> GGUFStored:
    kind = named.stored.type
    if kind.is_quantized and len(named.shape) != 2:
        raise CheckpointError(
            f"{named.stored.file}: {named.name} has the type {kind.name} and the shape "
            f"{list(named.shape)}. tk reads only matrices of this type."
        )
    return GGUFStored(
        named.stored.file,
        named.name,
        kind.name,
        named.shape,
        named.start,
        named.num_bytes,
        pairs=named.pairs,
        added=named.offset,
        heads=named.heads,
        is_decay=named.is_decay,
    )
