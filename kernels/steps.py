"""Steps of the loop in products with weights that have a scale for each group of columns.

Imports no torch: sizes of weights are known before they are loaded."""

from __future__ import annotations

MAX_GROUP = 128  # columns with one scale
MIN_WIDTH = 16  # columns of a plane in a step


def group_and_step(bits: int, columns: int, group: int) -> tuple[int, int] | None:
    """Return the columns with one scale, or a divisor, and those of a step. None: unsupported.

    A step has 1, 2 or 4 groups, at most one for each plane (`triton.grouped`): the columns of a
    plane have one scale."""
    planes = 16 // bits
    least, most = MIN_WIDTH * planes, MAX_GROUP * (2 if bits == 4 else 1)
    for size in (MAX_GROUP, 64, 32, 16):
        for step in (planes * size, planes * size // 2, planes * size // 4):
            is_supported = max(size, least) <= step <= most
            if is_supported and group % size == 0 and columns % step == 0:
                return size, step
    return None
