"""C++ kernels for CPUs, called through ctypes: plain pointers, no headers of torch or Python.

`library` loads them; each other module has the functions of one subject, which take torch CPU tensors. Without the library
(`available`, `problem`) callers use PyTorch's own operations.
"""

from toolkit.kernels.cpu.library import (
    available,
    bind_threads,
    num_threads,
    problem,
    set_num_threads,
    using,
    variant,
    variants,
)

__all__ = [
    "available",
    "bind_threads",
    "num_threads",
    "problem",
    "set_num_threads",
    "using",
    "variant",
    "variants",
]
