"""Numbers as people read them."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """1.50 GiB, 12.0 MiB, 3.2 KiB."""
    for unit, scale, digits in (("GiB", 2**30, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def count(number: int) -> str:
    """7.6B, 124M, 3.8K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return str(number)
