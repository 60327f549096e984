"""The page of latencies: how many requests took how long, and when."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import reduce
from operator import add

from toolkit.top import wording
from toolkit.top.drawing.draw import LABEL, NOW, heatmap, time_axis
from toolkit.top.drawing.paint import Block, Line, beside, rule, share_out
from toolkit.top.pages.page import Page
from toolkit.top.readings.server import LATENCIES
from toolkit.top.state import State

LEAST_HEIGHT = 12
LEAST_WIDTH = 70
MEANING = {
    "TTFT": "time to first token",
    "ITL": "between two tokens",
    "TPOT": "a request's mean between tokens",
    "E2E": "from arrival to end",
    "queue": "from arrival to running",
    "prefill": "from running to first token",
}


class LatencyPage(Page):
    """As many heatmaps as there is room for, the chosen one first."""

    title = "Latency"
    keys = (("h l", "Other latency"),)

    def __init__(self) -> None:
        self.first = 0

    def turn(self, by: int) -> bool:
        """See Page."""
        self.first = (self.first + by) % len(LATENCIES)
        return True

    def draw(self, state: State, width: int, height: int) -> Block:
        """The heatmaps in a grid."""
        across = 2 if width >= 2 * LEAST_WIDTH else 1
        down = max(1, min(height // LEAST_HEIGHT, -(-len(LATENCIES) // across)))
        names = list(LATENCIES)
        chosen = [
            names[(self.first + i) % len(names)] for i in range(min(len(names), across * down))
        ]
        made: Block = []
        for row in range(down):
            size = height * (row + 1) // down - height * row // down
            those = chosen[row * across : (row + 1) * across]
            widths = share_out(width, across)
            blocks = [
                (_one(name, state, one, size), one)
                for name, one in zip(those, widths, strict=False)
            ]
            made += beside(*blocks)
        return made


def _one(name: str, state: State, width: int, height: int) -> Block:
    found = state.view.latencies.get(name)
    said: Line = [(f"{MEANING[name]}   ", "dim")]
    if found is not None and found.count:
        for title, value in (("p50", found.p50), ("p90", found.p90), ("p99", found.p99)):
            said += [(f"{title} ", "dim"), (f"{wording.seconds(value)}   ", "value")]
    history = _together([list(server.bands[name])[-width:] for server in state.looked_at])
    made: Block = [
        rule(name, width),
        said,
        *heatmap(history, width, height - 3, colors=state.colors),
    ]
    axis = time_axis(state.view.ages, max(len(NOW), width - LABEL))
    return [*made, [(" " * LABEL, ""), *axis]]


def _together(several: Sequence[list[array[float]]]) -> Sequence[Sequence[float]]:
    """The counts of several servers added, aligned at the newest."""
    if len(several) == 1:
        return several[0]
    length = max(len(one) for one in several)
    made: list[Sequence[float]] = []
    for back in range(length, 0, -1):
        there: list[Sequence[float]] = [one[-back] for one in several if len(one) >= back]
        made.append(reduce(_sum, there))
    return made


def _sum(some: Sequence[float], others: Sequence[float]) -> Sequence[float]:
    return list(map(add, some, others))
