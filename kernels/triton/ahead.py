"""Parallel compilation of kernels before the steps that launch them; a count of late ones."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from triton import AsyncCompileMode, knobs
from triton.runtime import driver
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import KernelInterface

logger = logging.getLogger(__name__)


class LateCompilations:
    """Counts and logs the kernels that this process compiles from now on.

    A step that launches one waits for it: 0.2 to 0.6 s on an H200, or 10 ms if it is on disk."""

    def __init__(self) -> None:
        self._count, self._began = 0, 0.0
        knobs.runtime.jit_cache_hook = self._begin
        knobs.runtime.jit_post_compile_hook = self._end

    @staticmethod
    def stop() -> None:
        """Stop the count, as while another engine of this process starts."""
        knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = None

    def take(self) -> int:
        """Return the number since the last call."""
        count, self._count = self._count, 0
        return count

    def _begin(self, **_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *, fn: Any, repr: str, **_: object) -> None:
        self._count += 1
        seconds = time.perf_counter() - self._began
        logger.warning(
            "kernel %s was compiled while serving: a step waited %.2f s for it. This is a bug; "
            "please report it with this line: %s",
            fn.name,
            seconds,
            repr,
        )


class _Once(AsyncCompileMode):  # type: ignore[misc]  # Triton is untyped
    """Requests each kernel once.

    Triton's own class requests it at each launch until all are compiled, which takes ten times as
    long as a launch."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        super().__init__(pool, ignore_errors=True)
        self._requested: list[tuple[Any, Callable[[Any], None]]] = []

    def submit(
        self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Any:
        future = super().submit(key, compile_fn, finalize_fn)
        finalize_fn(future)
        self._requested.append((future, finalize_fn))
        return future

    def __exit__(self, *error: object) -> None:
        try:
            super().__exit__(*error)
        finally:  # also if the user interrupts it
            active_mode.set(None)
            for future, finalize in self._requested:
                finalize(future.kernel)  # None after a failure: its launch compiles it again


class _Loading(ThreadPoolExecutor):
    """Pool of threads that compile kernels and load them onto the device.

    Loading is here because some versions of Triton call a C compiler for it."""

    def submit(self, compile_fn: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def loaded() -> Any:
            kernel = compile_fn()
            kernel.run  # noqa: B018  # loads it
            return kernel

        return super().submit(loaded)


_LOCK = threading.Lock()  # held while the launches of a thread are replaced by compilations


@contextmanager
def compiled_side_by_side(num_threads: int) -> Iterator[None]:
    """Compile the kernels that this thread launches inside, on `num_threads` other threads.

    Nothing is launched, so kernels' outputs stay unchanged. All kernels are compiled at the end,
    unless they were already. One that does not compile raises where it is launched later. Other
    threads launch as usual; a second caller waits."""

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
