"""Slots: the destinations of a checkpoint's tensors in a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.distributed import Shard
from toolkit.weights.quantization import quantize


@dataclass(frozen=True, slots=True)
class Slot:
    """Destination of one checkpoint tensor: a parameter, or a view of the part that it fills."""

    target: torch.Tensor
    transpose: bool = False  # GPT-2's files have [in, out]; ours are [out, in]
    shards: tuple[Shard | None, ...] = ()
    """This rank's part of each of the target's first dimensions. None, or left out: all."""

    @property
    def needs_all_rows(self) -> bool:
        """True if the tensor cannot be filled in chunks of rows."""
        return False

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
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in the checkpoint."""
        return tuple(shard.total for shard in self.region)

    @property
    def parts(self) -> Sequence[Slot]:
        """Slots with one region each."""
        return (self,)

    def rows(self, first: int, count: int) -> Slot:
        """Return the slot of some rows of the checkpoint tensor."""
        part = slice(first, first + count)
        return Slot(self.target[:, part] if self.transpose else self.target[part], self.transpose)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a checkpoint tensor into place. Its type is converted on the target's device."""
        tensor = tensor.to(self.target.device)
        self.target.copy_(tensor.T if self.transpose else tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSlot(Slot):
    """Destination of a tensor stored in FP8 or int8, with a scale per row."""

    scale: torch.Tensor  # [rows of the target], fp32

    @property
    def needs_all_rows(self) -> bool:
        """True if transposed: the file's rows are columns here, and a scale needs all of them."""
        return self.transpose

    def rows(self, first: int, count: int) -> Slot:
        if self.transpose:
            return self
        part = slice(first, first + count)
        return QuantizedSlot(self.target[part], scale=self.scale[part])

    def fill(self, tensor: torch.Tensor) -> None:
        tensor = tensor.to(self.target.device)
        weight, scale = quantize(tensor.T if self.transpose else tensor, self.target.dtype)
        self.target.copy_(weight)
        self.scale.copy_(scale)


@dataclass(frozen=True, slots=True)
class JoinedSlot:
    """Destinations of a checkpoint tensor that holds several projections, each of them sharded."""

    parts: Sequence[Slot]  # their regions are those of the joined tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape


Slots = dict[str, Slot | JoinedSlot]  # slots by tensor name in the checkpoint


def plain_slots(module: torch.nn.Module, name: str) -> Slots:
    """Return the slots of a torch.nn module whose checkpoint name is `name`."""
    return {f"{name}.{own}": Slot(parameter) for own, parameter in module.named_parameters()}
