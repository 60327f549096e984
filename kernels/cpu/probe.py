"""What the machine can do, as a measure for the other kernels."""

from __future__ import annotations

import torch
from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel

PART = 2**18
"""Elements that one thread reads at a time."""
_read = Kernel("tk_probe_read", POINTER, SIZE, POINTER)


def read(x: torch.Tensor) -> torch.Tensor:
    """Sums of each PART of x, fp32 [n], on all threads; what is left over is not read."""
    sums = torch.empty(len(x) // PART)
    _read.run(x.data_ptr(), len(x), sums.data_ptr())
    return sums
