"""Columns of the devices' block table: blocks of the pages that the scheduler gives."""

from collections.abc import Sequence

import numpy as np
import torch

from toolkit.cache_group import CacheGroup, first_columns
from toolkit.scheduler.output import IntArray

ALIGNED = 4  # columns of a group begin at a multiple: kernels are compiled for such addresses


class TableColumns:
    """Places of the blocks of each group's pages in a row of the block table.

    Page p of a group has blocks R * p to R * p + R - 1, if R is its number of blocks per page."""

    def __init__(self, groups: Sequence[CacheGroup], block_size: int, max_model_len: int) -> None:
        self._groups = tuple(groups)
        self._pages = first_columns(groups, block_size, max_model_len)
        self._starts, self._widths = list[int](), list[int]()
        self.width = 0  # of a row
        for group, first, end in zip(groups, self._pages[:-1], self._pages[1:], strict=True):
            self._starts.append(-(-self.width // ALIGNED) * ALIGNED)
            self._widths.append((end - first) * group.blocks_per_page)
            self.width = self._starts[-1] + self._widths[-1]

    def split(self, table: torch.Tensor) -> list[torch.Tensor]:
        """Return each group's columns of a table [num_rows, width]."""
        pairs = zip(self._starts, self._widths, strict=True)
        return [table[:, start : start + width] for start, width in pairs]

    def of_pages(
        self, rows: IntArray, columns: IntArray, pages: IntArray
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return (rows, columns, blocks) of pages that are in columns of the scheduler's table."""
        if len(self._groups) == 1:
            return rows, columns, pages
        found = []
        ends = self._pages[1:]
        for group, start, first, end in zip(
            self._groups, self._starts, self._pages[:-1], ends, strict=True
        ):
            which = (first <= columns) & (columns < end)
            count, nth = group.blocks_per_page, np.arange(group.blocks_per_page, dtype=np.int32)
            own_columns, blocks = (
                (one[which][:, None] * count + nth).ravel() for one in (columns - first, pages)
            )
            found.append((np.repeat(rows[which], count), start + own_columns, blocks))
        rows, columns, blocks = (np.concatenate(one) for one in zip(*found, strict=True))
        return rows, columns, blocks

    def of_tables(self, tables: Sequence[Sequence[int]]) -> list[tuple[int, IntArray]]:
        """Return (first column, blocks) of a request's pages in each group. Holes are block 0."""
        found = []
        for group, start, table in zip(self._groups, self._starts, tables, strict=True):
            pages = np.maximum(np.array(table, np.int32), 0)
            nth = np.arange(group.blocks_per_page, dtype=np.int32)
            found.append((start, (pages[:, None] * group.blocks_per_page + nth).ravel()))
        return found
