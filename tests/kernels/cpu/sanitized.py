"""Pytest plugin that loads the CPU kernels from the library at SANITIZED_KERNELS."""

import ctypes
import os
from typing import Any


class SanitizedCDLL(ctypes.CDLL):
    """Loader that takes the sanitized library in place of the kernels' own."""

    def __init__(self, name: Any, *args: Any, **kwargs: Any) -> None:
        if str(name).endswith("_kernels.so"):
            name = os.environ["SANITIZED_KERNELS"]
        super().__init__(name, *args, **kwargs)


# `library` always loads from its own folder, so this replaces the loader.
ctypes.CDLL = SanitizedCDLL  # type: ignore[misc]
