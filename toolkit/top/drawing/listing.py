"""Table that can be sorted, filtered and scrolled: its state and its drawing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rich.cells import cell_len

from toolkit.top.drawing.paint import Block, Line, cut, fit

T = TypeVar("T")
Key = float | str


@dataclass(frozen=True, slots=True)
class Column(Generic[T]):
    """A column: `text` of a cell, and `key` to sort by.

    On a narrow screen, columns with the highest `spare` are dropped first. A column with `most`
    grows up to that width."""

    title: str
    width: int
    text: Callable[[T], str]
    key: Callable[[T], Key]
    left: bool = False
    descending: bool = True
    spare: int = 0
    most: int = 0
    style: Callable[[T], str] = field(default=lambda _: "")
    draw: Callable[[T, int], Line] | None = None


def text_column(title: str, width: int, text: Callable[[T], str], **options: Any) -> Column[T]:
    """Return a left-aligned column, sorted by its text in ascending order."""
    return Column(title, width, text, text, left=True, descending=False, **options)


class Listing(Generic[T]):
    """A table of rows of any kind.

    `name_of` identifies a row, so that the cursor stays on it while others come and go. `searched`
    is the text that the filter matches. `sort` is the title of a column, or None for no sorting."""

    def __init__(
        self,
        columns: Sequence[Column[T]],
        name_of: Callable[[T], str],
        searched: Callable[[T], str],
        sort: str | None,
        empty: str = "No rows.",
    ) -> None:
        self.columns = list(columns)
        self.name_of = name_of
        self.searched = searched
        self.sort = sort
        self.is_reversed = False
        self.filter = ""
        self.empty = empty
        self.rows: list[T] = []
        self.num_all = 0
        self.cursor = 0
        self.above = 0  # lines of the page above the table
        self._offset = 0
        self._height = 1
        self._titles = [column.title for column in self.columns]  # of the visible columns

    @property
    def current(self) -> T | None:
        """Row under the cursor."""
        return self.rows[self.cursor] if self.rows else None

    def show(self, rows: Sequence[T]) -> None:
        """Replace the rows."""
        current = self.name_of(self.rows[self.cursor]) if self.rows else None
        wanted = self.filter.lower()
        kept = (
            [row for row in rows if wanted in self.searched(row).lower()] if wanted else list(rows)
        )
        for column in self.columns:
            if column.title == self.sort:
                kept.sort(key=self.name_of)
                kept.sort(key=column.key, reverse=column.descending != self.is_reversed)
        self.rows, self.num_all = kept, len(rows)
        names = [self.name_of(row) for row in kept]
        self.cursor = (
            names.index(current) if current in names else min(self.cursor, max(0, len(kept) - 1))
        )

    def sort_next(self) -> None:
        """Sort by the next visible column."""
        now = self._titles.index(self.sort) if self.sort in self._titles else -1
        self.sort = self._titles[(now + 1) % len(self._titles)]
        self.is_reversed = False

    def reverse(self) -> None:
        self.is_reversed = not self.is_reversed

    def move(self, by: int) -> None:
        """Move the cursor down by `by` rows, or up if negative."""
        self.cursor = max(0, min(len(self.rows) - 1, self.cursor + by))

    def move_page(self, by: int) -> None:
        """Move the cursor by screens."""
        self.move(by * max(1, self._height - 1))

    def point_at(self, y: int) -> None:
        """Move the cursor to the row in line `y` of the page."""
        row = y - self.above - 1  # below the header
        if 0 <= row < len(self.rows) - self._offset:
            self.cursor = self._offset + row

    def draw(self, width: int, height: int) -> Block:
        """Draw a header and the rows around the cursor."""
        self._height = max(1, height - 1)
        highest = max(0, len(self.rows) - self._height)
        self._offset = max(
            self.cursor - self._height + 1, min(self._offset, self.cursor, highest), 0
        )
        fitting = self._fitting(width)
        self._titles = [column.title for column, _ in fitting if column.title]
        lines = [self._header(fitting, width)]
        if not self.rows:
            text = (
                f"No row matches the filter {self.filter!r}."
                if self.filter and self.num_all
                else self.empty
            )
            return [*lines, [], [(f"  {text}", "dim")]]
        for index in range(self._offset, min(len(self.rows), self._offset + self._height)):
            line = fit(self._row(self.rows[index], fitting), width)
            lines.append(
                [(text, f"select {style}") for text, style in line]
                if index == self.cursor
                else line
            )
        return lines

    def _fitting(self, width: int) -> list[tuple[Column[T], int]]:
        """Return the visible columns with their widths."""
        kept = list(self.columns)
        while sum(column.width + 1 for column in kept) - 1 > width and any(
            column.spare for column in kept
        ):
            kept.remove(max(reversed(kept), key=lambda column: column.spare))
        left = max(0, width - sum(column.width + 1 for column in kept) + 1)
        growing = sorted((column for column in kept if column.most), key=lambda column: column.most)
        more: dict[int, int] = {}
        for index, column in enumerate(growing):
            more[id(column)] = min(left // (len(growing) - index), column.most - column.width)
            left -= more[id(column)]
        return [(column, column.width + more.get(id(column), 0)) for column in kept]

    def _header(self, fitting: Sequence[tuple[Column[T], int]], width: int) -> Line:
        line: Line = []
        for column, size in fitting:
            is_sorted = column.title == self.sort
            arrow = ("▼" if column.descending != self.is_reversed else "▲") if is_sorted else ""
            title = cut(column.title, size - len(arrow)) + arrow
            line.append(
                (_aligned(title, size, left=column.left), "head sorted" if is_sorted else "head")
            )
            line.append((" ", "head"))
        used = sum(size + 1 for _, size in fitting)
        return [*line, (" " * max(0, width - used), "head")] if used <= width else line[:-1]

    def _row(self, row: T, fitting: Sequence[tuple[Column[T], int]]) -> Line:
        line: Line = []
        for index, (column, size) in enumerate(fitting):
            line += [(" ", "")] if index else []
            if column.draw is not None:
                line += column.draw(row, size)
            else:
                text = _aligned(cut(column.text(row), size), size, left=column.left)
                line.append((text, column.style(row)))
        return line


def _aligned(text: str, width: int, *, left: bool) -> str:
    blank = " " * (width - cell_len(text))
    return text + blank if left else blank + text
