"""The library of CPU kernels: find it, choose the variant for this machine, call it."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from toolkit.kernels.switch import VARIABLE, kernels_are_off

PATH = Path(__file__).with_name("_kernels.so")
VARIANTS = ("portable", "avx2", "avx512_vnni", "avx512_bf16")
"""Instruction sets that kernels are compiled for, each a superset of the one before."""

POINTER, SIZE, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Kernel:
    """A function of the library. `run` calls the variant in use with arguments of `argtypes`.

    Pointers are integers (`tensor.data_ptr()`) or None. Callers check the arguments."""

    __slots__ = ("argtypes", "name", "run")
    run: Any

    def __init__(self, name: str, *argtypes: Any) -> None:
        self.name, self.argtypes = name, list(argtypes)
        _kernels.append(self)
        self.bind(_variant)

    def bind(self, variant: str | None) -> None:
        """Use a variant's function. None: there is no library."""
        if _library is None or variant is None:
            self.run = _missing
            return
        self.run = getattr(_library, f"{self.name}_{variant}")
        self.run.argtypes, self.run.restype = self.argtypes, None


def problem() -> str | None:
    """Return why the kernels cannot run, or None if they can."""
    return f"{VARIABLE} turns them off" if kernels_are_off() else _problem


def available() -> bool:
    return _problem is None and not kernels_are_off()


def variant() -> str | None:
    """Return the variant in use."""
    return _variant


def variants() -> tuple[str, ...]:
    """Return the variants that this machine can run."""
    return VARIANTS[: VARIANTS.index(_best) + 1] if _best else ()


@contextmanager
def using(variant: str) -> Iterator[None]:
    """Use a variant's kernels inside, for tests and measurements."""
    before = _variant
    _use(variant)
    try:
        yield
    finally:
        _use(before)


def kernels() -> Sequence[Kernel]:
    """Return all kernels."""
    return _kernels


def set_num_threads(count: int) -> None:
    """Set the number of threads that kernels run on, the caller's included."""
    if _library is not None:
        _library.tk_set_num_threads(count)


def num_threads() -> int:
    return int(_library.tk_num_threads()) if _library is not None else 1


def bind_threads(cpus: Sequence[Sequence[int]]) -> bool:
    """Bind the pool's threads to processors by number. Return False if the system refuses.

    The first entry is ignored: it is the caller's, and threads that it starts would inherit it."""
    if _library is None:
        return False
    return all(
        _library.tk_bind_thread(index, (SIZE * len(own))(*own), len(own))
        for index, own in enumerate(cpus)
        if index
    )


def use_huge_pages(address: int, size: int) -> None:
    """Ask for huge pages in [address, address + size) bytes, before they are first written."""
    if _library is not None:
        _library.tk_use_huge_pages(address, size)


def _use(variant: str | None) -> None:
    global _variant
    _variant = variant
    for kernel in _kernels:
        kernel.bind(variant)


def _missing(*_: object) -> None:
    raise RuntimeError(f"The CPU kernels cannot run: {_problem}")


def _load() -> tuple[ctypes.CDLL | None, str | None, str | None]:
    """Return (library, its best variant here, why there is none)."""
    if not PATH.is_file():
        return (
            None,
            None,
            "they were not built: tk was installed without a C++ compiler (g++ or clang++)",
        )
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        return None, None, f"{PATH} cannot be loaded: {error}"
    library.tk_variant.restype = ctypes.c_char_p
    library.tk_set_num_threads.argtypes, library.tk_set_num_threads.restype = [SIZE], None
    library.tk_num_threads.restype = SIZE
    library.tk_bind_thread.argtypes, library.tk_bind_thread.restype = [SIZE, POINTER, SIZE], SIZE
    library.tk_use_huge_pages.argtypes, library.tk_use_huge_pages.restype = [POINTER, SIZE], None
    return library, library.tk_variant().decode(), None


_kernels: list[Kernel] = []
_library, _best, _problem = _load()
_variant = _best
