"""What the machine can do, as a measure for the other kernels."""

from __future__ import annotations

import ctypes
import time

import torch

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel
from toolkit.kernels.cpu.linear import KINDS

PART = 2**18
"""Elements that one thread reads at a time."""
ROUNDS, TASKS = 2**16, 32
_read = Kernel("tk_probe_read", POINTER, SIZE, POINTER)
_multiply = Kernel("tk_probe_multiply", SIZE, SIZE, SIZE, POINTER, POINTER)


def read(x: torch.Tensor) -> torch.Tensor:
    """Sums of each PART of x, fp32 [n], on all threads; what is left over is not read."""
    sums = torch.empty(len(x) // PART)
    _read.run(x.data_ptr(), len(x), sums.data_ptr())
    return sums


def multiply(dtype: torch.dtype) -> float:
    """Operations per second (a product and a sum are two) with weights of this type, on all threads and from registers alone."""
    sums, operations = torch.empty(TASKS), ctypes.c_int64()
    start = time.perf_counter()
    _multiply.run(KINDS[dtype], ROUNDS, TASKS, sums.data_ptr(), ctypes.addressof(operations))
    return operations.value / (time.perf_counter() - start)
