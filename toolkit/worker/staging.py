"""Asynchronous copies to the device through pinned buffers, used in turn."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

SLOTS = 8
"""Up to three per step, for two steps in flight, one of which may still wait for the device."""
ALIGNED = 4
"""Numbers to which each array that is sent is padded."""
PADDING = np.zeros(ALIGNED, np.int32)


class Staging:
    """Copies arrays to the device in one copy, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._slots = [_Slot(device) for _ in range(SLOTS)]
        self._next = 0

    def send(self, arrays: Sequence[npt.NDArray[np.int32]]) -> list[torch.Tensor]:
        """Return the arrays on the device, int32, flat, each aligned to 16 bytes.

        A kernel would be compiled a second time for an address that is not."""
        parts = [part for array in arrays for part in (array, PADDING[: -array.size % ALIGNED])]
        sizes = [part.size for part in parts]
        target = torch.empty(sum(sizes), dtype=torch.int32, device=self.device)
        self.send_into(target, parts)
        return list(torch.split(target, sizes)[::2])

    def send_into(self, target: torch.Tensor, arrays: Sequence[npt.NDArray[np.int32]]) -> None:
        """Fill `target`, int32, with the concatenated arrays."""
        size = target.numel()
        slot = self._slots[self._next]
        self._next = (self._next + 1) % SLOTS
        buffer = slot.take(size)
        np.concatenate([array.reshape(-1) for array in arrays], out=buffer.numpy())
        target.copy_(buffer, non_blocking=True)
        slot.copied()


class _Slot:
    """A host buffer, and the event of its last copy to the device."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self._done = torch.cuda.Event() if self._pinned else None  # type: ignore[no-untyped-call]
        self._buffer = self._allocate(4096)

    def take(self, size: int) -> torch.Tensor:
        """Return the first `size` numbers of the buffer, once they are free. Grows it if needed."""
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
