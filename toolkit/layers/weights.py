"""Where a checkpoint's tensors go."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one checkpoint tensor: a parameter, or a view of the part of it that the tensor fills."""

    target: torch.Tensor
    transpose: bool = False
    """GPT-2's files hold [in, out]; ours are [out, in]."""

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


Slots = dict[str, Slot]
"""By the tensor's name in the checkpoint."""
