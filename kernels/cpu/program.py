"""Recorded sequences of kernel calls, run without Python in between."""

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.kernels.cpu.library import POINTER, SIZE, Kernel, kernels

MAX_ARGUMENTS = 6
T = TypeVar("T")
Call = tuple[int, tuple[Any, ...]]  # A kernel's address and its arguments

_run = Kernel("tk_run", POINTER, SIZE)
_recording = threading.Lock()


class UnrecordableError(Exception):
    """The function computes with more than kernels."""


class _Call(ctypes.Structure):
    """Mirror of `Call` in program.cpp."""

    _fields_ = [("function", POINTER), ("arguments", SIZE * MAX_ARGUMENTS)]  # ctypes wants a list


class Program:
    """Recorded calls. Each run repeats them on the same memory."""

    def __init__(self, calls: Sequence[Call], memory: object) -> None:
        """`memory`: owner of buffers that the calls use, and whose tensors are gone."""
        self._memory = memory
        self._calls = (_Call * len(calls))(
            *(
                _Call(address, tuple(argument or 0 for argument in arguments))
                for address, arguments in calls
            )
        )

    def __len__(self) -> int:
        return len(self._calls)

    def run(self) -> None:
        _run.run(ctypes.addressof(self._calls), len(self._calls))


class Recorder:
    """Records programs. They share the memory of their intermediate tensors.

    So one runs at a time, and its results are valid until another one runs."""

    def __init__(self) -> None:
        self._memory = _Memory()

    def record(self, function: Callable[[], T]) -> tuple[Program, T]:
        """Call the function. Return (program of its kernel calls, its result).

        The program reads and writes the same tensors again. The caller keeps those that it needs.

        Raises UnrecordableError, after some of the calls, if anything but kernels computes."""
        with _recording, _recorded() as calls, self._memory:
            result = function()
        return Program(calls, self._memory), result


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Allocates empty tensors from buffers that are kept and reused. Refuses to compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._free: dict[int, list[npt.NDArray[np.uint8]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else PyTorch loads its compiler, which takes seconds, to skip this."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return self._empty(tuple(args[0]), kwargs.get("dtype") or torch.get_default_dtype())
        if not func._schema.is_mutable:
            result = func(*args, **kwargs)
            if _shares_memory(result, args[0]):
                return result
        raise UnrecordableError(str(func))

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        size = max(64, 1 << (nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else np.empty(size, np.uint8)
        own = memory[:nbytes]  # lives as long as the tensor and its views do
        weakref.finalize(own, free.append, memory)
        return torch.from_numpy(own).view(dtype).view(shape)


def _shares_memory(result: Any, given: Any) -> bool:
    """Return True if one is a view of the other, so that nothing was computed."""
    both = isinstance(result, torch.Tensor) and isinstance(given, torch.Tensor)
    return both and result.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@contextmanager
def _recorded() -> Iterator[list[Call]]:
    """Yield the list of kernel calls that this thread makes inside."""
    calls: list[Call] = []
    thread, before = threading.get_ident(), {kernel: kernel.run for kernel in kernels()}

    def recording(kernel: Kernel, run: Any) -> Callable[..., None]:
        address = ctypes.cast(run, POINTER).value
        assert address is not None
        fits = len(kernel.argtypes) <= MAX_ARGUMENTS and set(kernel.argtypes) <= {POINTER, SIZE}

        def call(*arguments: Any) -> None:
            if threading.get_ident() == thread:
                if not fits:
                    raise UnrecordableError(kernel.name)
                calls.append((address, arguments))
            run(*arguments)

        return call

    for kernel, run in before.items():
        kernel.run = recording(kernel, run)
    try:
        yield calls
        if len(kernels()) != len(before):
            raise UnrecordableError("a kernel was loaded while recording")
    finally:
        for kernel, run in before.items():
            kernel.run = run
