"""C++ kernels for CPUs, called through ctypes: plain pointers, no headers of torch or Python.

`library` loads them. Each other module has the functions of one subject, on torch CPU tensors.
Without the library (`available`, `problem`) callers use PyTorch's own operations.

`setup.py` compiles every kernel for each instruction set (portable, AVX2, AVX-512 with VNNI, and
with BF16 too) into one library, and `library` takes the best that the machine has. A decode step is
about a hundred short calls. So weights, norms and attention layers are prepared once, after loading
(`PackedLinear`, `PackedGroups`, `Join`, `Layer`), and a call only checks its input and passes
addresses."""

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
