"""Limits of the machine, to compare the other kernels with."""

import ctypes
import time

import torch

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel
from toolkit.kernels.cpu.linear import KINDS

PART = 2**18  # elements that a thread reads at a time
ROUNDS, TASKS = 2**16, 32
_read = Kernel("tk_probe_read", POINTER, SIZE, POINTER)
_multiply = Kernel("tk_probe_multiply", SIZE, SIZE, SIZE, POINTER, POINTER)


def read(x: torch.Tensor) -> torch.Tensor:
    """Return the sum of each PART of x, fp32 [n], by all threads. The remainder is not read."""
    sums = torch.empty(len(x) // PART)
    _read.run(x.data_ptr(), len(x), sums.data_ptr())
    return sums


def multiply(dtype: torch.dtype) -> float:
    """Return operations per second, on all threads from registers. A product and a sum are two."""
    sums, operations = torch.empty(TASKS), ctypes.c_int64()
    start = time.perf_counter()
    _multiply.run(KINDS[dtype], ROUNDS, TASKS, sums.data_ptr(), ctypes.addressof(operations))
    return operations.value / (time.perf_counter() - start)
