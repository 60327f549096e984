"""Sizes of steps: their budget of tokens, and the padded sizes of steps with CUDA graphs.

Steps are padded to the next size. The closer the sizes, the less padding; the more sizes, the
longer the start and the more memory. They are chosen by timing, see "Sizes of steps" in
docs/notes/where-the-time-goes.md."""

import math

Table = tuple[tuple[float, int], ...]
"""Rows (end of a range, distance of its sizes, which are multiples of it)."""

TOKEN_BUDGETS = {"cuda": 8192, "cpu": 2048}
"""Tokens of a step at most, by the type of the device."""
DECODE: Table = ((2, 1), (4, 2), (256, 8), (512, 16), (math.inf, 64))
"""Requests of decode steps."""
VERIFY: Table = ((2, 1), (4, 2), (16, 4), (32, 8), (112, 16), (math.inf, 32))
"""Requests of steps that verify drafts."""
MIXED: Table = ((512, 64), (1024, 128), (2048, 256), (3072, 512), (4096, 1024), (8192, 2048))
"""Tokens of steps with prompts. Larger steps gain nothing by a graph."""
SAMPLED = (4, 16, 64, 256)
"""Rows of logits that are sampled again."""
CLIPS = (1, 2, 4)
"""Clips that are encoded at once. An H200's products are no faster with more of 30 s."""
MOST_PICTURE_ROWS = 2048  # of a captured tower
MOST_PICTURES = 16  # of a captured tower
PICTURE_ROWS = 128  # distance of a tower's sizes


def sizes_below(end: float, table: Table) -> tuple[int, ...]:
    """Return the sizes of a table that are less than `end`."""
    sizes: list[int] = []
    for last, apart in table:
        first = sizes[-1] // apart * apart + apart if sizes else apart
        sizes += range(first, math.ceil(min(last + 1, end)), apart)
    return tuple(sizes)


def picture_rows(fixed: int) -> tuple[int, ...]:
    """Return the padded rows of captured towers: those of the pictures that are encoded together.

    fixed: rows of every picture; 0 if they differ."""
    if fixed:
        count = min(MOST_PICTURES, MOST_PICTURE_ROWS // fixed)
        return tuple(fixed * number for number in range(1, count + 1))
    return tuple(range(PICTURE_ROWS, MOST_PICTURE_ROWS + 1, PICTURE_ROWS))
