"""The page of servers: one line each."""

from __future__ import annotations

from dataclasses import dataclass

from toolkit.top import wording
from toolkit.top.diagnosis import Diagnosis, diagnose
from toolkit.top.drawing.draw import spark
from toolkit.top.drawing.listing import Column, Listing
from toolkit.top.drawing.paint import Block, Line, squeeze
from toolkit.top.pages.page import Page
from toolkit.top.readings.arithmetic import Latency
from toolkit.top.readings.server import Server
from toolkit.top.state import State
from toolkit.top.view import View, view_of

NO_LATENCY = Latency(None, None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Row:
    """A server and its numbers."""

    server: Server
    view: View
    diagnosis: Diagnosis
    state: str
    is_stale: bool


def _rate(row: Row) -> str:
    return wording.short(row.view.generation_rate)


def _median(name: str) -> Column[Row]:
    def value(row: Row) -> float | None:
        return row.view.latencies.get(name, NO_LATENCY).p50

    return Column(
        name, 7, lambda row: wording.seconds(value(row)), lambda row: value(row) or 0.0, spare=1
    )


def _trend(row: Row, width: int) -> Line:
    return spark(row.server.points["generation"], width)


COLUMNS: tuple[Column[Row], ...] = (
    Column("server", 12, lambda row: row.server.name, lambda row: row.server.name, left=True, descending=False, most=30,
           draw=lambda row, width: [(squeeze(row.server.name, width), "")]),
    Column("state", 10, lambda row: row.state, lambda row: row.state, left=True, descending=False,
           style=lambda row: "bad" if row.is_stale else "good"),
    Column("model", 12, lambda row: row.view.model or wording.NOTHING, lambda row: row.view.model, left=True,
           descending=False, spare=4),
    Column("version", 8, lambda row: row.view.version or wording.NOTHING, lambda row: row.view.version, left=True,
           descending=False, spare=5),
    Column("tok/s", 6, _rate, lambda row: row.view.generation_rate or 0.0),
    Column("run", 4, lambda row: wording.short(row.view.running), lambda row: row.view.running or 0.0),
    Column("wait", 4, lambda row: wording.short(row.view.waiting), lambda row: row.view.waiting or 0.0,
           style=lambda row: "warn" if row.view.waiting else ""),
    Column("KV", 4, lambda row: wording.percent(row.view.kv_usage, 0), lambda row: row.view.kv_usage or 0.0),
    Column("hits", 4, lambda row: wording.percent(row.view.prefix_hit_rate, 0), lambda row: row.view.prefix_hit_rate or 0.0,
           spare=3),
    _median("TTFT"),
    _median("ITL"),
    Column("why slow", 9, lambda row: row.diagnosis.kind, lambda row: row.diagnosis.level, left=True,
           style=lambda row: row.diagnosis.style),
    Column("generation, last while", 40, _rate, lambda row: row.view.mean_generation_rate or 0.0, left=True, spare=6,
           most=400, draw=_trend),
)  # fmt: skip


class ServersPage(Page):
    """All servers; Enter looks at one of them."""

    title = "Servers"
    keys = (("Enter", "Look at"), ("s", "Sort"), ("/", "Filter"))
    shows_age = False

    def __init__(self) -> None:
        self.listing: Listing[Row] = Listing(
            COLUMNS,
            lambda row: row.server.url,
            lambda row: f"{row.server.name} {row.view.model}",
            sort=None,
        )

    def show(self, state: State) -> None:
        """See Page."""
        self.listing.show([_row(state, server) for server in state.servers])

    def draw(self, state: State, width: int, height: int) -> Block:
        """The table, and below it what is wrong with the server under the cursor."""
        row = self.listing.current
        said: Block = (
            [[], [(row.server.error, "bad")]] if row is not None and row.server.error else []
        )
        return self.listing.draw(width, height - len(said)) + said


def _row(state: State, server: Server) -> Row:
    view = view_of([server])
    age = state.age(server)
    told = (
        "up"
        if not state.is_stale(server)
        else "away"
        if server.last is None
        else f"stale {wording.duration(age)}"
    )
    if server.tried is None:
        told = "..."
    return Row(server, view, diagnose(server, view), told, state.is_stale(server))
