"""From the host to the device without waiting: pinned memory, filled in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

SLOTS = 8
"""Buffers in turn: up to three for each of two steps, one of which may still wait for its turn on the device."""


class Staging:
    """Takes arrays to the device in one copy, in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots = [_Slot(device) for _ in range(SLOTS)]
        self._next = 0

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        """The arrays on the device, int32, flat."""
        sizes = [array.size for array in arrays]
        target = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        self.send_into(target, arrays)
        return list(torch.split(target, sizes))

    def send_into(self, target: torch.Tensor, arrays: Sequence[npt.NDArray[np.int32]]) -> None:
        """Fills `target`, int32, with the arrays one after another."""
        size = target.numel()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        buffer = slot.take(size)
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy())
        target.copy_(buffer, non_blocking=True)
        slot.copied()


class _Slot:
    """A buffer on the host, and when its last copy to the device is done."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._done = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]  # torch's
        self._buffer = self._allocate(4096)

    def take(self, size: int) -> torch.Tensor:
        """The buffer's first `size` numbers, once they are free; a larger one when it is too small."""
        if self._done is not None:
            self._done.synchronize()
        if self._buffer.numel() < size:
            self._buffer = self._allocate(1 << (size - 1).bit_length())
        return self._buffer[:size]

    def copied(self) -> None:
        if self._done is not None:
            self._done.record()

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)
