"""Where a checkpoint's tensors go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from toolkit.distributed import Share
from toolkit.weights.quantization import quantize


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor: a parameter, or a view of the part of it that the tensor fills."""

    target: torch.Tensor
    transpose: bool = False
    """GPT-2's files hold [in, out]; ours are [out, in]."""
    shares: tuple[Share | None, ...] = ()
    """What this rank has of the target's first dimensions; None, and dimensions left out: all."""

    @property
    def whole(self) -> bool:
        """Whether the tensor must come in one piece."""
        return False

    @property
    def region(self) -> tuple[Share, ...]:
        """What goes here of the checkpoint's tensor, by its dimensions."""
        shares = [*self.shares, *[None] * (self.target.dim() - len(self.shares))]
        region = tuple(
            share or Share(size, 0, size)
            for share, size in zip(shares, self.target.shape, strict=True)
        )
        return region[::-1] if self.transpose else region

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape the tensor has in the checkpoint."""
        return tuple(share.total for share in self.region)

    @property
    def parts(self) -> Sequence[Slot]:
        """Slots that are each of one region."""
        return (self,)

    def rows(self, first: int, count: int) -> Slot:
        """The place of some rows of the checkpoint tensor."""
        part = slice(first, first + count)
        return Slot(self.target[:, part] if self.transpose else self.target[part], self.transpose)

    def fill(self, tensor: torch.Tensor) -> None:
        """Copies a checkpoint tensor of `shape` into place; its type is converted on the target's device."""
        tensor = tensor.to(self.target.device)
        self.target.copy_(tensor.T if self.transpose else tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedSlot(Slot):
    """The place of a tensor whose rows are kept in FP8 or int8, each with a scale. No other copy of it is made on the way."""

    scale: torch.Tensor
    """[rows of the target], fp32"""

    @property
    def whole(self) -> bool:
        """A transposed tensor comes by columns, and a row's scale is known by all of them."""
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
    """The places of a checkpoint tensor that holds several projections, one after the other, of each of which a rank has a share."""

    parts: Sequence[Slot]
    """They begin at `Share.begin` of what is theirs of the whole."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts[0].shape


Slots = dict[str, Slot | JoinedSlot]
"""By the tensor's name in the checkpoint."""


def plain_slots(module: torch.nn.Module, name: str) -> Slots:
    """The parameters of one of PyTorch's own modules, under the checkpoint's name for it."""
    return {f"{name}.{own}": Slot(parameter) for own, parameter in module.named_parameters()}
