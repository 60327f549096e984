"""Turns all other versions of the kernels off, to compare them with plain PyTorch (`tk verify`).

Models that are built while they are off compute with `reference` and PyTorch's own operations. The
switch is an environment variable, so that it reaches the processes of other ranks too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Literal

VARIABLE = "TOOLKIT_KERNELS"
Version = Literal["reference", "dequantized"]
"""dequantized: products with 8-bit weights do not round their input. reference: they do."""


@contextmanager
def only_pytorch(version: Version) -> Iterator[None]:
    """Turn the kernels off inside. No model that was built outside may run there."""
    before = os.environ.get(VARIABLE)
    _set(version)
    try:
        yield
    finally:
        _set(before)


@cache
def kernels_are_off() -> bool:
    return os.environ.get(VARIABLE) is not None


def rounds_inputs() -> bool:
    """Return False if products with 8-bit weights leave their input as it is."""
    return os.environ.get(VARIABLE) != "dequantized"


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = value
    kernels_are_off.cache_clear()
