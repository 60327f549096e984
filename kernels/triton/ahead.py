"""Kernels compiled side by side, before the steps that launch them one after the other."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from triton import AsyncCompileMode
from triton.runtime import driver
from triton.runtime.jit import KernelInterface


class _Once(AsyncCompileMode):  # type: ignore[misc]  # Triton is untyped
    """Triton's own asks for a kernel anew at each launch until all are there, which takes ten times as long as to launch it."""

    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(kernel)
        return kernel


class _Loading(ThreadPoolExecutor):
    """Also loads what it compiled onto the device, for which some versions of Triton call a C compiler."""

    def submit(self, compile_fn: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def loaded() -> Any:
            kernel = compile_fn()
            kernel.run  # noqa: B018  # loads it
            return kernel

        return super().submit(loaded)


@contextmanager
def compiled_side_by_side() -> Iterator[None]:
    """What is launched inside is compiled instead, unless it was, on as many threads as there are cores; all of it when this ends.

    So nothing is computed, and what kernels would have written is what was there. What does not compile raises where it is
    launched. For one thread at a time, with no other that launches anything.
    """

    def compile_only(kernel: Any, grid: Any) -> Any:
        return partial(kernel.run, grid=grid, warmup=True)

    launch = KernelInterface.__getitem__
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = driver.active.get_current_device()
    pool = _Loading(threads, initializer=driver.active.set_current_device, initargs=(here,))
    with pool, _Once(pool, ignore_errors=True):
        KernelInterface.__getitem__ = compile_only
        try:
            yield
        finally:
            KernelInterface.__getitem__ = launch
