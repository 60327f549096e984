"""Lines of styled text, as the dashboard draws them. They are built and tested without a terminal.

Styles are names, which `palette` turns into colors."""

from collections.abc import Iterable
from itertools import zip_longest

from rich.cells import cell_len, set_cell_size

Line = list[tuple[str, str]]  # (text, style) from left to right
Block = list[Line]  # lines from top to bottom

GAP = 2  # columns between blocks side by side


def plain(lines: Iterable[Line]) -> str:
    """Return the text without styles."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def width_of(line: Line) -> int:
    """Return the width in terminal columns."""
    return sum(cell_len(text) for text, _ in line)


def fit(line: Line, width: int) -> Line:
    """Pad the line to `width` columns, or cut it with an ellipsis."""
    used = width_of(line)
    if used <= width:
        return [*line, (" " * (width - used), "")] if used < width else line
    spans: Line = []
    left = max(0, width - 1)
    for text, style in line:
        size = cell_len(text)
        if size > left:
            return [*spans, (set_cell_size(text, left) + "…" * min(1, width), style)]
        spans.append((text, style))
        left -= size
    return spans


def cut(text: str, width: int) -> str:
    """Cut the text with an ellipsis to at most `width` columns."""
    return (
        text
        if cell_len(text) <= width
        else set_cell_size(text, max(0, width - 1)) + "…" * min(1, width)
    )


def cut_middle(text: str, width: int) -> str:
    """Pad ASCII text to `width` columns, or cut its middle: server names differ at both ends."""
    if len(text) <= width:
        return text.ljust(width)
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def wrap(text: str, width: int, lines: int) -> list[str]:
    """Wrap words into at most `lines` lines; the last one is cut."""
    wrapped = [""]
    for word in text.split():
        longer = f"{wrapped[-1]} {word}".strip()
        if cell_len(longer) <= width or len(wrapped) == lines:
            wrapped[-1] = longer
        else:
            wrapped.append(word)
    return [cut(line, width) for line in wrapped]


def heading(title: str, width: int, note: str = "") -> Line:
    """Draw the heading of a block, with a note at its right end if there is space."""
    line: Line = [("─ ", "rule"), (title, "title"), (" ", "")]
    end: Line = [(f" {note} ", "dim"), ("─", "rule")] if note else []
    left = width - width_of(line) - width_of(end)
    if left < 2 and note:
        return heading(title, width)
    return fit([*line, ("─" * left, "rule"), *end], width)


def side_by_side(*blocks: tuple[Block, int]) -> Block:
    """Draw (block, width) pairs next to each other."""
    rows: Block = []
    for lines in zip_longest(*(block for block, _ in blocks), fillvalue=None):
        row: Line = []
        for index, (line, (_, width)) in enumerate(zip(lines, blocks, strict=True)):
            row += [(" " * GAP, "")] if index else []
            row += fit(line or [], width)
        rows.append(row)
    return rows


def split_width(width: int, count: int) -> list[int]:
    """Return the widths of `count` blocks side by side."""
    total = width - GAP * (count - 1)
    return [total * (i + 1) // count - total * i // count for i in range(count)]


def spread(left: Line, right: Line, width: int) -> Line:
    """Draw two texts at the ends of a line. The left one is cut if both do not fit."""
    left_width = max(0, width - width_of(right) - 1)
    return [*fit(left, left_width), (" ", ""), *right]
