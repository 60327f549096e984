"""Pytest plugin that loads the CPU kernels from the library at SANITIZED_KERNELS."""

from __future__ import annotations

import ctypes
import os
from typing import Any

_load = ctypes.CDLL


def _sanitized(name: Any, *args: Any, **kwargs: Any) -> ctypes.CDLL:
    return _load(
        os.environ["SANITIZED_KERNELS"] if str(name).endswith("_kernels.so") else name,
        *args,
        **kwargs,
    )


# `library` always loads from its own folder, so this replaces the loader.
ctypes.CDLL = _sanitized  # type: ignore[misc,assignment]  # a function for a class
