"""A plugin of pytest: the CPU kernels come from the library that SANITIZED_KERNELS names."""

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


ctypes.CDLL = _sanitized  # type: ignore[misc,assignment]  # nothing else decides where `library` loads from
