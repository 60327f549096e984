"""Text in pieces that each have the name of a style. All that the dashboard draws is made of it, so that it can be made, cut
and tested without a terminal; `palette` turns the names into colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size

Line = list[tuple[str, str]]
"""(text, style) from left to right."""
Block = list[Line]
"""Lines from top to bottom."""

GAP = 2
"""Columns between blocks that stand side by side."""


def plain(lines: Iterable[Line]) -> str:
    """The text alone."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def width_of(line: Line) -> int:
    """In columns of the terminal."""
    return sum(cell_len(text) for text, _ in line)


def fit(line: Line, width: int) -> Line:
    """The line in exactly `width` columns: filled up, or cut with an ellipsis."""
    used = width_of(line)
    if used <= width:
        return [*line, (" " * (width - used), "")] if used < width else line
    made: Line = []
    left = max(0, width - 1)
    for text, style in line:
        size = cell_len(text)
        if size > left:
            return [*made, (set_cell_size(text, left) + "…" * min(1, width), style)]
        made.append((text, style))
        left -= size
    return made


def cut(text: str, width: int) -> str:
    """Text in at most `width` columns."""
    return (
        text
        if cell_len(text) <= width
        else set_cell_size(text, max(0, width - 1)) + "…" * min(1, width)
    )


def squeeze(text: str, width: int) -> str:
    """Text in exactly `width` columns of one character each; what is too long loses its middle, as hosts and ports tell
    servers apart.
    """
    if len(text) <= width:
        return text.ljust(width)
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Words in at most `lines` lines; the last is cut where they do not fit."""
    made = [""]
    for word in text.split():
        longer = f"{made[-1]} {word}".strip()
        if cell_len(longer) <= width or len(made) == lines:
            made[-1] = longer
        else:
            made.append(word)
    return [cut(line, width) for line in made]


def rule(title: str, width: int, note: str = "") -> Line:
    """A heading over a block, with a remark at its right end."""
    line: Line = [("─ ", "rule"), (title, "title"), (" ", "")]
    end: Line = [(f" {note} ", "dim"), ("─", "rule")] if note else []
    left = width - width_of(line) - width_of(end)
    if left < 2 and note:
        return rule(title, width)
    return fit([*line, ("─" * left, "rule"), *end], width)


def beside(*blocks: tuple[Block, int]) -> Block:
    """Blocks next to each other, each with its width."""
    made: Block = []
    for lines in zip_longest(*(block for block, _ in blocks), fillvalue=None):
        row: Line = []
        for index, (line, (_, width)) in enumerate(zip(lines, blocks, strict=True)):
            row += [(" " * GAP, "")] if index else []
            row += fit(line or [], width)
        made.append(row)
    return made


def share_out(width: int, count: int) -> list[int]:
    """The widths of `count` blocks side by side."""
    room = width - GAP * (count - 1)
    return [room * (i + 1) // count - room * i // count for i in range(count)]


def columns(cells: Sequence[str], widths: Sequence[int], style: str = "") -> Line:
    """Cells of a table's row, at the right ends of their columns."""
    return [
        (f"{cut(cell, width):>{width}}", style) for cell, width in zip(cells, widths, strict=True)
    ]


def ends(left: Line, right: Line, width: int) -> Line:
    """Two texts at the two ends of a line; the left one gives way."""
    room = max(0, width - width_of(right) - 1)
    return [*fit(left, room), (" ", ""), *right]
