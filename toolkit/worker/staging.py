"""From the host to the device without waiting: pinned memory, filled in turn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

SLOTS = 4
"""Buffers in turn. Two steps may be under way, and the host is filling the next one's."""


class Staging:
    """Takes arrays to the device in one copy, in the order of the device's work."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [_pinned(4096) for _ in range(SLOTS)]
        self._copied = [torch.cuda.Event() for _ in range(SLOTS)]  # type: ignore[no-untyped-call]  # torch's
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
        buffer = self._buffer(size)
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy()[:size])
        target.copy_(buffer[:size], non_blocking=True)
        self._copied[self._next].record()
        self._next = (self._next + 1) % SLOTS

    def _buffer(self, size: int) -> torch.Tensor:
        """The next buffer, once its last copy is done; a larger one when it is too small."""
        self._copied[self._next].synchronize()
        if self._buffers[self._next].numel() < size:
            self._buffers[self._next] = _pinned(1 << (size - 1).bit_length())
        return self._buffers[self._next]


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int32, pin_memory=True)
