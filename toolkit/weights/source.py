"""Sources of projections in a checkpoint, and orders of their rows. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, slots=True)
class RowOrder:
    """Some rows of a checkpoint tensor, in order."""

    total: int  # number of rows of the tensor
    rows: range | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A projection's rows in a checkpoint, of its weight and of its bias."""

    name: str  # of the tensors, without .weight or .bias
    order: RowOrder | None = None  # None: all rows as they are
    transpose: bool = False  # the file has [in, out]
    stack: tuple[int, int] | None = None
    """(index, number) of this one of several projections of a shape, which are one tensor."""
    is_bare: bool = False  # the weight has `name` alone, its bias ends with _bias
    has_bias: bool = True  # False: the checkpoint has none, where the product has; it is zero

    def tensor(self, kind: str) -> str:
        """Return the name of a tensor: `weight`, `bias`, or one of a packing."""
        if not self.is_bare:
            return f"{self.name}.{kind}"
        return self.name if kind == "weight" else f"{self.name}_{kind}"

    def cuts_blocks(self, first: int, count: int, height: int) -> bool:
        """Return True if `count` of its rows from `first` on are not complete blocks of the tensor.

        height: rows of a block."""
        if self.order is None or height == 1:
            return False
        rows = np.array(self.order.rows[first : first + count])
        begins = rows[::height]
        inside = rows == np.repeat(begins, height)[:count] + np.arange(count) % height
        return bool((begins % height).any() or not inside.all())

    @property
    def is_every_second_row(self) -> bool:
        """True for rows that are in turn with those of another projection."""
        rows = None if self.order is None else self.order.rows
        return isinstance(rows, range) and rows.step == 2


@cache
def consecutive(*sizes: int) -> tuple[RowOrder, ...]:
    """Return the orders of projections that are concatenated in one tensor."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        RowOrder(ends[-1], range(end - size, end)) for size, end in zip(sizes, ends, strict=True)
    )


@cache
def grouped(num_groups: int, *sizes: int) -> tuple[RowOrder, ...]:
    """Return the orders of parts in a tensor of groups that have so many rows of each part.

    Such as a group of a KV head's queries, its key and its value (GPT-NeoX, Falcon)."""
    width = sum(sizes)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(
        RowOrder(
            num_groups * width,
            tuple(
                group * width + row for group in range(num_groups) for row in range(end - size, end)
            ),
        )
        for size, end in zip(sizes, ends, strict=True)
    )


@cache
def pairs_apart(head_size: int, rotary_size: int | None = None) -> tuple[int, ...]:
    """Return the order of a head's entries that moves pairs (2i, 2i + 1) to (i, i + half).

    Rotation of adjacent pairs (interleaved) then is rotation of halves. Scores stay the same, since
    queries and keys are permuted alike."""
    size = head_size if rotary_size is None else rotary_size
    return (*range(0, size, 2), *range(1, size, 2), *range(size, head_size))


@cache
def by_head(order: RowOrder | None, num_heads: int, entries: tuple[int, ...]) -> RowOrder:
    """Return `order` (None: all rows) with the rows of each head in the order `entries`."""
    size = len(entries)
    rows = range(num_heads * size) if order is None else order.rows
    total = len(rows) if order is None else order.total
    return RowOrder(
        total, tuple(rows[head * size + entry] for head in range(num_heads) for entry in entries)
    )
