"""Capture of CUDA graphs, and what must not happen meanwhile."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any, TypeVar

import torch

_lock = RLock()
Result = TypeVar("Result")


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """Capture what is launched inside on the current stream. Memory comes from `pool`, if given.

    No garbage is collected meanwhile: it may contain graphs of an engine that is no longer used,
    and destroying these during a capture is an error that spoils it. After an error the graph is
    reset: NCCL does not end while a graph contains one of its calls."""
    with _lock:
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the error may have ended the capture
                    graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()


def capture(run: Callable[[], Result], pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Run a function, which compiles missing kernels, and capture it. Return (graph, result)."""
    run()
    graph = torch.cuda.CUDAGraph()
    with captured(graph, pool):
        result = run()
    return graph, result


def empty_cache() -> None:
    """Release PyTorch's cached GPU memory, after any running capture, which forbids it."""
    with _lock:
        torch.cuda.empty_cache()
