"""Byte sizes and large numbers as text."""

GIB = 2**30


def size(num_bytes: float) -> str:
    """Format bytes: 1.50 GiB, 12.0 MiB, 3.2 KiB, 17 B."""
    for unit, scale, digits in (("GiB", GIB, 2), ("MiB", 2**20, 1), ("KiB", 2**10, 1)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes:.0f} B"


def count(number: int) -> str:
    """Format a number with three digits: 7.6B, 124M, 3.81K."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return str(number)
