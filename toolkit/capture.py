"""Capturing CUDA graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any = None) -> Iterator[None]:
    """What is launched inside on the current stream becomes the graph; its memory is of the pool, or its own.

    No garbage is collected meanwhile: the graphs of an engine that is no longer used may be in it, and to destroy those while a stream
    is captured is not permitted and spoils the capture.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        graph.capture_begin(pool, capture_error_mode="thread_local")
        yield
        graph.capture_end()
    finally:
        if collects:
            gc.enable()
