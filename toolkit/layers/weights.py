"""Where a checkpoint's tensors go."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toolkit.quantization import fp8


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor: a parameter, or a view of the part of it that the tensor fills."""

    target: torch.Tensor
    transpose: bool = False
    """GPT-2's files hold [in, out]; ours are [out, in]."""

    @property
    def whole(self) -> bool:
        """Whether the tensor must come in one piece."""
        return False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape the tensor has in the checkpoint."""
        return tuple(reversed(self.target.shape)) if self.transpose else tuple(self.target.shape)

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
    """The place of a tensor whose rows are kept in FP8, each with a scale. No other copy of it is made on the way."""

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
        weight, scale = fp8.quantize(tensor.T if self.transpose else tensor)
        self.target.copy_(weight)
        self.scale.copy_(scale)


Slots = dict[str, Slot]
"""By the tensor's name in the checkpoint."""


def plain_slots(module: torch.nn.Module, name: str) -> Slots:
    """The parameters of one of PyTorch's own modules, under the checkpoint's name for it."""
    return {f"{name}.{own}": Slot(parameter) for own, parameter in module.named_parameters()}
