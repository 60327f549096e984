"""Slots of quantized projections: a packing decodes its tensors when all of them were read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from toolkit.distributed import Shard
from toolkit.errors import CheckpointError
from toolkit.weights.formats.packing import Packing, Part
from toolkit.weights.groups import Decoded, select
from toolkit.weights.slots import FLOATS, UNREAD, JoinedSlot, Slot
from toolkit.weights.weight import Stored


def packed_slots(
    weight: Stored,
    name: str,
    packing: Packing,
    rows: slice,
    shards: tuple[Shard, Shard],
    order: tuple[int, ...] | None = None,
) -> dict[str, Slot | JoinedSlot]:
    """Return the slots of a quantized projection, by the ends of its tensors' names.

    It fills rows of the weight. shards: of the checkpoint's rows and columns; order: see `Slot`."""

    def write(decoded: Decoded) -> None:
        if order is not None:
            decoded = select(decoded, torch.tensor(order, device=device))
        weight.write(rows, decoded)

    device = next(weight.parameters()).device
    return Projection(name, packing, shards, device, write).slots()


class Projection:
    """This rank's part of a quantized projection, while it is read."""

    def __init__(
        self,
        name: str,
        packing: Packing,
        shards: tuple[Shard, Shard],
        device: torch.device,
        write: Callable[[Decoded], None],
    ) -> None:
        """`write`: is called with the decoded weight, once."""
        self.name, self.packing, self.device, self._write = name, packing, device, write
        self._rows, self._columns = shards
        self._parts = packing.parts(*shards)
        self._missing = {
            kind for kind, part in self._parts.items() if part.is_used and not part.is_optional
        }
        self._read: dict[str, torch.Tensor] = {}

    def slots(self) -> dict[str, Slot | JoinedSlot]:
        """Return the slots of the tensors, by the ends of their names."""
        target = torch.empty(0, device=self.device)
        return {
            kind: CollectedSlot(target, projection=self, kind=kind, part=part)
            if part.is_used
            else UNREAD
            for kind, part in self._parts.items()
        }

    def expect(self, kind: str) -> None:
        """Wait for an optional tensor too: the checkpoint has it."""
        self._missing.add(kind)

    def buffer(self, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory for a tensor."""
        if kind not in self._read:
            self._read[kind] = torch.empty(shape, dtype=dtype, device=self.device)
        return self._read[kind]

    def finish(self, kind: str) -> None:
        """Decode the projection if this was the last tensor."""
        self._missing.discard(kind)
        if self._missing:
            return
        read, self._read = self._read, {}
        try:
            decoded = self.packing.decode(read, self._rows, self._columns)
        except ValueError as error:
            raise CheckpointError(f"{self.name} cannot be read: {error}.") from None
        self._write(decoded)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectedSlot(Slot):
    """Destination of a tensor of a quantized projection. `target` is empty: it has the device."""

    projection: Projection
    kind: str  # end of the tensor's name
    part: Part
    first: int = 0  # row that this slot begins with

    @property
    def needs_all_rows(self) -> bool:
        return self.part.region is None

    @property
    def is_optional(self) -> bool:
        return self.part.is_optional

    @property
    def region(self) -> tuple[Shard, ...]:
        return self.part.region or ()

    @property
    def shape(self) -> tuple[int, ...] | None:
        return None if self.part.region is None else tuple(part.total for part in self.region)

    def accepts(self, dtype: torch.dtype) -> bool:
        wanted: torch.dtype = getattr(torch, self.part.type)
        return dtype == wanted or (wanted == torch.float32 and dtype.is_floating_point)

    @property
    def wanted(self) -> str:
        return FLOATS if self.part.type == "float32" else self.part.type

    def announce(self) -> None:
        self.projection.expect(self.kind)

    def rows(self, first: int, count: int) -> Slot:
        return self if self.needs_all_rows else replace(self, first=self.first + first)

    def fill(self, tensor: torch.Tensor) -> None:
        shape = tuple(tensor.shape)
        if self.region:  # rows of GGUF's blocks are read as bytes
            shape = self.region[0].count, *shape[1:]
        buffer = self.projection.buffer(self.kind, shape, getattr(torch, self.part.type))
        if not buffer.dim() or self.needs_all_rows:
            buffer.copy_(tensor)
            self.projection.finish(self.kind)
            return
        end = self.first + len(tensor)
        buffer[self.first : end].copy_(tensor)
        if end == len(buffer):
            self.projection.finish(self.kind)
