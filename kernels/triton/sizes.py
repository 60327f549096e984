"""Sizes of tiles."""


def power_of_two(n: int) -> int:
    """Return the least power of two >= n. Triton's function takes microseconds, in every layer."""
    return 1 << (n - 1).bit_length()
