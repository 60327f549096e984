"""Slots: the destinations of a checkpoint's tensors in a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from toolkit.distributed import Shard

FLOATS = "a floating-point type"


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor: a parameter, or a view of the part that it fills."""

    target: torch.Tensor
    transpose: bool = False  # the file has [in, out]; ours are [out, in]
    shards: tuple[Shard | None, ...] = ()
    """This rank's part of each of the target's first dimensions. None, or left out: all."""
    order: tuple[int, ...] | None = None
    """Row of the tensor for each row of the target. None: the rows of the shard. The first of
    `shards` then has all rows of the tensor."""
    entries: tuple[int, ...] | None = None
    """Entry of the tensor's last dimension for each of the target's. None: the same."""
    offset: float = 0.0  # added to the tensor
    factor: float = 1.0  # multiplies the tensor before that

    @property
    def needs_all_rows(self) -> bool:
        """True if the tensor cannot be filled in chunks of rows."""
        return self.order is not None or self.entries is not None or not self.target.dim()

    @property
    def region(self) -> tuple[Shard, ...]:
        """Part of the checkpoint's tensor that goes here, per dimension of that tensor."""
        shards = [*self.shards, *[None] * (self.target.dim() - len(self.shards))]
        region = tuple(
            shard or Shard(size, 0, size)
            for shard, size in zip(shards, self.target.shape, strict=True)
        )
        return region[::-1] if self.transpose else region

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the tensor in the checkpoint. None: any."""
        return tuple(shard.total for shard in self.region)

    @property
    def is_optional(self) -> bool:
        """True if the checkpoint may lack the tensor."""
        return False

    @property
    def parts(self) -> Sequence[Slot]:
        """Slots with one region each."""
        return (self,)

    def accepts(self, dtype: torch.dtype) -> bool:
        """Return True if the tensor may have this type."""
        return dtype.is_floating_point == self.target.is_floating_point()

    @property
    def wanted(self) -> str:
        """Type of the tensor, for messages."""
        return FLOATS if self.target.is_floating_point() else "integers"

    def announce(self) -> None:
        """Note that the checkpoint has the tensor. Called before any slot is filled."""

    def rows(self, first: int, count: int) -> Slot:
        """Return the slot of some rows of the checkpoint tensor."""
        if self.needs_all_rows:
            return self
        part = slice(first, first + count)
        target = self.target[:, part] if self.transpose else self.target[part]
        return Slot(target, self.transpose, offset=self.offset, factor=self.factor)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a checkpoint tensor into place. Its type is converted on the target's device."""
        self.target.copy_(self._arranged(tensor))
        if self.factor != 1.0:
            self.target.mul_(self.factor)
        if self.offset:
            self.target.add_(self.offset)

    def _arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the target's device, in the target's order."""
        tensor = tensor.to(self.target.device)
        if not self.target.dim():
            return tensor.reshape(())
        if self.transpose:
            tensor = tensor.T
        if self.order is not None:
            tensor = tensor[torch.tensor(self.order, device=tensor.device)]
        if self.entries is not None:
            tensor = tensor[..., torch.tensor(self.entries, device=tensor.device)]
        return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSlot(Slot):
    """Destination of a tensor that is quantized while it is loaded. `target` only has its shape."""

    store: Callable[[slice, torch.Tensor], None]
    """Quantizes rows of the tensor, and stores them in these rows of the weight."""
    first: int  # row of the weight that this slot begins with

    @property
    def needs_all_rows(self) -> bool:
        """True if transposed: the file's rows are columns here, and a scale needs all of them."""
        return self.transpose or self.order is not None

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype.is_floating_point

    @property
    def wanted(self) -> str:
        return FLOATS

    def rows(self, first: int, count: int) -> Slot:
        if self.needs_all_rows:
            return self
        part, begin = slice(first, first + count), self.first + first
        return QuantizedSlot(self.target[part], store=self.store, first=begin)

    def fill(self, tensor: torch.Tensor) -> None:
        arranged = self._arranged(tensor)
        self.store(slice(self.first, self.first + len(arranged)), arranged)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedSlot(Slot):
    """Destination of one entry of a checkpoint tensor's first dimension. `target`: of `entry`."""

    entry: Slot
    stack: Shard

    @classmethod
    def of(cls, slot: Slot | JoinedSlot, stack: tuple[int, int]) -> Slot | JoinedSlot:
        """Return the slot of entry (index, number of entries) that fills `slot`."""
        index, count = stack
        if isinstance(slot, JoinedSlot):
            return slot
        return cls(slot.target, entry=slot, stack=Shard(count, index, 1))

    @property
    def needs_all_rows(self) -> bool:
        return True

    @property
    def region(self) -> tuple[Shard, ...]:
        return (self.stack, *self.entry.region)

    @property
    def is_optional(self) -> bool:
        return self.entry.is_optional

    def accepts(self, dtype: torch.dtype) -> bool:
        return self.entry.accepts(dtype)

    @property
    def wanted(self) -> str:
        return self.entry.wanted

    def announce(self) -> None:
        self.entry.announce()

    def rows(self, first: int, count: int) -> Slot:
        return self

    def fill(self, tensor: torch.Tensor) -> None:
        self.entry.fill(tensor[0])


@dataclass(frozen=True, slots=True)
class JoinedSlot:
    """Destinations of a checkpoint tensor that holds several projections, each of them sharded."""

    shape: tuple[int, ...] | None  # None: any
    parts: Sequence[Slot]  # their regions are those of the joined tensor. none: not needed here
    is_optional: bool = False


UNREAD = JoinedSlot(None, (), is_optional=True)
"""Slot of a tensor that a checkpoint may have, and that is not read."""


def joined_slot(slots: Sequence[Slot | JoinedSlot]) -> Slot | JoinedSlot:
    """Return the slot of a tensor that all these are parts of."""
    if len(slots) == 1:
        return slots[0]
    parts = [part for slot in slots for part in slot.parts]
    return JoinedSlot(slots[0].shape, parts, all(slot.is_optional for slot in slots))


Slots = dict[str, Slot | JoinedSlot]  # slots by tensor name in the checkpoint


def plain_slots(module: torch.nn.Module, name: str) -> Slots:
    """Return the slots of a torch.nn module whose checkpoint name is `name`."""
    return {f"{name}.{own}": Slot(parameter) for own, parameter in module.named_parameters()}
