"""Kernels compiled side by side, before the steps that launch them one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import KernelInterface


class _Once(AsyncCompileMode):  # type: ignore[misc]  # Triton is untyped
    """Triton's own asks for a kernel anew at each launch until all are there, which takes ten times as long as to launch it."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self._asked: list[tuple[Any, Callable[[Any], None]]] = []

    def submit(
        self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Any:
        coming = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(coming)
        self._asked.append((coming, finalize_fn))
        return coming

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:  # also where the user interrupts it
            active_mode.set(None)
            for come, finalize in self._asked:
                finalize(
                    come.kernel
                )  # None, if it was in vain: it is tried again where it is launched


class _Loading(ThreadPoolExecutor):
    """Also loads what it compiled onto the device, for which some versions of Triton call a C compiler."""

    def submit(self, compile_fn: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def loaded() -> Any:
            kernel = compile_fn()
            kernel.run  # noqa: B018  # loads it
            return kernel

        return super().submit(loaded)


_LOCK = threading.Lock()
"""Held while launches of one thread are compilations."""


@contextmanager
def compiled_side_by_side(num_threads: int) -> Iterator[None]:
    """What this thread launches inside is compiled instead, unless it was, on `num_threads` others; all of it when this ends.

    So nothing is computed, and what kernels would have written is what was there. What does not compile raises where it is
    launched. Other threads launch as ever, and wait where they come here.
    """

    def launched(kernel: Any, grid: Any) -> Any:
        if threading.get_ident() == this:
            return partial(kernel.run, grid=grid, warmup=True)
        return launch(kernel, grid)

    this = threading.get_ident()
    device = driver.active.get_current_device()
    pool = _Loading(num_threads, initializer=driver.active.set_current_device, initargs=(device,))
    with _LOCK, pool, _Once(pool):
        launch = KernelInterface.__getitem__
        KernelInterface.__getitem__ = launched
        try:
            yield
        finally:
            KernelInterface.__getitem__ = launch
