"""Bars, charts and heatmaps in characters."""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby

from toolkit.top import wording
from toolkit.top.drawing.bands import NUM_BANDS, lower_bound
from toolkit.top.drawing.paint import Block, Line
from toolkit.top.readings.server import Point

EIGHTHS = " ▁▂▃▄▅▆▇█"
SHADES = " ░▒▓█"
HUES = 4  # brightnesses of a chart, from bottom to top
HEAT = 15  # hottest color of a heatmap; 0 is its background
EPSILON = 1e-9  # below this, a chart shows 0
NOW = "now"
LABEL = 8  # columns left of a heatmap, for times


def bar(share: float | None, width: int, style: str = "bar") -> Line:
    """Draw a share from 0 to 1. Its end is visible without colors too."""
    filled = round(min(max(share or 0.0, 0.0), 1.0) * width)
    return [("━" * filled, style), ("─" * (width - filled), "track")]


def usage_style(share: float | None) -> str:
    """Return the style of a share that should be low, such as memory in use."""
    if share is None:
        return "bar"
    return "bad" if share >= 0.95 else "warn" if share >= 0.8 else "bar"


def axis_top(value: float) -> float:
    """Round up to 1, 2, 3, 5 or 8 times a power of ten, so that a chart's scale rarely changes."""
    if value < EPSILON:
        return 1.0
    decade = 10.0 ** math.floor(math.log10(value))
    return next(
        (step * decade for step in (1, 2, 3, 5, 8, 10) if step * decade >= value), 10 * decade
    )


def sparkline(points: Iterable[Point], width: int, style: str = "spark") -> Line:
    """Draw a chart of one line, the newest point at the right. Unknown points are blank.

    The highest column leaves an eighth free, so that adjacent lines stay apart."""
    shown = _newest(points, width)
    top = max((point for point in shown if point is not None), default=0.0) or 1.0
    text = "".join(
        " "
        if point is None
        else EIGHTHS[max(1, math.ceil(7 * min(1.0, point / top)))]
        if point > 0
        else "▁"
        for point in shown
    )
    return [(text, style)]


def chart(
    points: Iterable[Point], width: int, height: int, hue: str, top: float | None = None
) -> Block:
    """Draw columns from 0 to `top` (default: a round number), the newest point at the right."""
    shown = _newest(points, width)
    ceiling = top or axis_top(max((p for p in shown if p is not None), default=0.0))
    scale = 8 * height / ceiling
    columns = [
        _column(None if point is None else min(8 * height, round(scale * point)), height)
        for point in shown
    ]
    lines: Block = []
    for row, cells in zip(range(height - 1, -1, -1), zip(*columns, strict=True), strict=False):
        brightness = min(HUES - 1, row * HUES // height)
        lines.append([("".join(cells), f"{hue}{brightness}")])
    return lines


@lru_cache(maxsize=4096)
def _column(eighths: int | None, height: int) -> str:
    """Draw one column from top to bottom. 0 is one eighth high, None is blank."""
    if eighths is None:
        return " " * height
    full, rest = divmod(max(1, eighths), 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(height)[::-1]


def time_axis(ages: Sequence[float], width: int) -> Line:
    """Label times below a chart. `ages` of its points are in seconds, the newest last."""
    cells = [" "] * (width - len(NOW)) + list(NOW)
    for back in (30, 60, 120, 180, 300, 600, 1200, 1800, 3600):
        index = bisect_left(ages, -back, key=lambda age: -age)  # the first point that is not older
        column = width - len(ages) + index
        label = f"-{wording.duration(back).replace(' 0 s', '').replace(' 0 min', '')}"
        around = cells[max(0, column - 1) : column + len(label) + 1]
        if index and column >= 0 and around.count(" ") == len(label) + 2:
            cells[column : column + len(label)] = label
    return [("".join(cells), "dim")]


def heatmap(history: Iterable[Sequence[float]], width: int, height: int, *, colors: bool) -> Block:
    """Draw counts by band (upwards) over time (to the right).

    With colors, a line of text has two rows of cells."""
    shown = list(history)[-(width - LABEL) :] if width > LABEL else []
    used = [band for band, counts in enumerate(zip(*shown, strict=True)) if any(counts)]
    if not used:
        return [
            [("no observations yet".center(width), "dim")] if y == height // 2 else []
            for y in range(height)
        ]
    rows = _rows(used[0], used[-1], height * 2 if colors else height)
    counted = {row: [sum(counts[row[0] : row[1]]) for counts in shown] for row in set(rows)}
    cells = [counted[row] for row in rows]
    hottest = max(max(row) for row in cells)
    scale = (HEAT - 0.01) / math.log1p(hottest)
    levels = [
        [math.ceil(scale * math.log1p(count)) if count > 0 else 0 for count in row] for row in cells
    ]
    margin = " " * (width - LABEL - len(shown))
    lines: Block = []
    for y in range(height):
        line: Line = [(f"{_label(rows, y, height):>{LABEL - 1}} ", "dim"), (margin, "heat0/0")]
        if colors:
            line += _runs("▀", zip(levels[2 * y], levels[2 * y + 1], strict=True))
        else:
            line.append(("".join(SHADES[math.ceil(4 * heat / HEAT)] for heat in levels[y]), ""))
        lines.append(line)
    return lines


def _runs(character: str, pairs: Iterable[tuple[int, int]]) -> Line:
    """Merge equal neighbours into one span."""
    return [
        (character * len(list(run)), f"heat{pair[0]}/{pair[1]}") for pair, run in groupby(pairs)
    ]


def _rows(lowest: int, highest: int, count: int) -> list[tuple[int, int]]:
    """Return `count` ranges of bands (from, to), the slowest first, that cover those in use.

    Several rows may share a band."""
    num_bands = highest - lowest + 1
    each = -(-num_bands // count)  # bands per row
    if each > 1 or num_bands == count:
        first = max(0, min(lowest - (each * count - num_bands) // 2, NUM_BANDS - each * count))
        return [(first + each * i, first + each * (i + 1)) for i in range(count - 1, -1, -1)]
    times = max(1, count // num_bands)  # rows per band
    needed = -(-count // times)
    first = max(0, min(lowest - (needed - num_bands) // 2, NUM_BANDS - needed))
    return [(first + i // times, first + i // times + 1) for i in range(count - 1, -1, -1)]


def _label(rows: Sequence[tuple[int, int]], y: int, height: int) -> str:
    """Return the lower bound of a line, on every third line."""
    if (height - 1 - y) % 3:
        return ""
    per_line = len(rows) // height
    return wording.seconds(lower_bound(rows[per_line * (y + 1) - 1][0]))


def _newest(points: Iterable[Point], width: int) -> list[Point]:
    """Return the last `width` points, padded with None on the left."""
    known = list(points)[-width:] if width > 0 else []
    return [None] * (width - len(known)) + known
