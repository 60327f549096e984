"""Capturing CUDA graphs, and what may not be done meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import Any

import torch

_one_at_a_time = RLock()


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside on the current stream becomes the graph; its memory is of the pool, or its own.

    No garbage is collected meanwhile: the graphs of an engine that is no longer used may be in it, and to destroy those while a stream
    is captured is not permitted and spoils the capture. After an error nothing is left of the graph: NCCL does not end before the last
    one that has a call of it.
    """
    with _one_at_a_time:
        collects = gc.isenabled()
        gc.disable()
        try:
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # the capture may be over by that error
                    graph.capture_end()
                graph.reset()
                raise
            graph.capture_end()
        finally:
            if collects:
                gc.enable()


def empty_cache() -> None:
    """Gives back what PyTorch keeps of the GPUs' memory and no tensor has. Waits for a capture that is under way: PyTorch would refuse."""
    with _one_at_a_time:
        torch.cuda.empty_cache()
