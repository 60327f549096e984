"""Imports of many modules at once."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Import modules inside without garbage collection, which takes a third of torch's import.

    The collector would visit their growing number of objects again and again. Later collections
    skip all objects that exist by then."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
