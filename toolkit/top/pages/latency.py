"""Latency page: heatmaps of request times."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import add

from toolkit.top import wording
from toolkit.top.drawing.draw import LABEL, NOW, heatmap, time_axis
from toolkit.top.drawing.paint import Block, Line, heading, side_by_side, split_width
from toolkit.top.pages.page import Page
from toolkit.top.readings.server import LATENCIES
from toolkit.top.state import State

MIN_HEIGHT = 12
MIN_WIDTH = 70
MEANING = {
    "TTFT": "time to first token",
    "ITL": "between two tokens",
    "TPOT": "mean time per token of a request",
    "E2E": "from arrival to end",
    "queue": "from arrival to running",
    "prefill": "from running to first token",
}


class LatencyPage(Page):
    """Heatmaps of latencies, as many as fit, the chosen one first."""

    title = "Latency"
    keys = (("h l", "Other latency"),)

    def __init__(self) -> None:
        self.first = 0

    def turn(self, by: int) -> bool:
        self.first = (self.first + by) % len(LATENCIES)
        return True

    def draw(self, state: State, width: int, height: int) -> Block:
        num_columns = 2 if width >= 2 * MIN_WIDTH else 1
        num_rows = max(1, min(height // MIN_HEIGHT, -(-len(LATENCIES) // num_columns)))
        names = list(LATENCIES)
        count = min(len(names), num_columns * num_rows)
        chosen = [names[(self.first + i) % len(names)] for i in range(count)]
        lines: Block = []
        for row in range(num_rows):
            row_height = height * (row + 1) // num_rows - height * row // num_rows
            in_row = chosen[row * num_columns : (row + 1) * num_columns]
            blocks = [
                (_draw_latency(name, state, column_width, row_height), column_width)
                for name, column_width in zip(in_row, split_width(width, num_columns), strict=False)
            ]
            lines += side_by_side(*blocks)
        return lines


def _draw_latency(name: str, state: State, width: int, height: int) -> Block:
    found = state.view.latencies.get(name)
    summary: Line = [(f"{MEANING[name]}   ", "dim")]
    if found is not None and found.count:
        for title, value in (("p50", found.p50), ("p90", found.p90), ("p99", found.p99)):
            summary += [(f"{title} ", "dim"), (f"{wording.seconds(value)}   ", "value")]
    history = _add_histories([list(server.bands[name])[-width:] for server in state.shown_servers])
    lines: Block = [
        heading(name, width),
        summary,
        *heatmap(history, width, height - 3, colors=state.has_colors),
    ]
    axis = time_axis(state.view.ages, max(len(NOW), width - LABEL))
    return [*lines, [(" " * LABEL, ""), *axis]]


def _add_histories(several: Sequence[list[array[float]]]) -> Sequence[Sequence[float]]:
    """Add the counts of several servers, aligned at the newest."""
    if len(several) == 1:
        return several[0]
    length = max(len(one) for one in several)
    total: list[Sequence[float]] = []
    for back in range(length, 0, -1):
        counts: list[Sequence[float]] = [one[-back] for one in several if len(one) >= back]
        total.append(reduce(_add_counts, counts))
    return total


def _add_counts(some: Sequence[float], others: Sequence[float]) -> Sequence[float]:
    return list(map(add, some, others))
