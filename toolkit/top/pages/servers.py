"""Servers page: one line per server."""

from dataclasses import dataclass

from toolkit.top import wording
from toolkit.top.diagnosis import Diagnosis, diagnose
from toolkit.top.drawing.draw import sparkline
from toolkit.top.drawing.listing import Column, Listing, text_column
from toolkit.top.drawing.paint import Block, Line, cut_middle
from toolkit.top.pages.page import Page
from toolkit.top.readings.arithmetic import Latency
from toolkit.top.readings.server import Server
from toolkit.top.state import State
from toolkit.top.view import View, view_of

NO_LATENCY = Latency(None, None, None, None, 0.0)


@dataclass(frozen=True, slots=True)
class ServerRow:
    """A server and its numbers."""

    server: Server
    view: View
    diagnosis: Diagnosis
    state: str
    is_stale: bool


def _rate(row: ServerRow) -> str:
    return wording.short(row.view.generation_rate)


def _median(name: str) -> Column[ServerRow]:
    def value(row: ServerRow) -> float | None:
        return row.view.latencies.get(name, NO_LATENCY).p50

    return Column(
        name, 7, lambda row: wording.seconds(value(row)), lambda row: value(row) or 0.0, spare=1
    )


def _trend(row: ServerRow, width: int) -> Line:
    return sparkline(row.server.points["generation"], width)


COLUMNS: tuple[Column[ServerRow], ...] = (
    text_column(
        "server",
        12,
        lambda row: row.server.name,
        most=30,
        draw=lambda row, width: [(cut_middle(row.server.name, width), "")],
    ),
    text_column(
        "state", 10, lambda row: row.state, style=lambda row: "bad" if row.is_stale else "good"
    ),
    text_column("model", 12, lambda row: row.view.model or wording.NOTHING, spare=4),
    text_column("version", 8, lambda row: row.view.version or wording.NOTHING, spare=5),
    Column("tok/s", 6, _rate, lambda row: row.view.generation_rate or 0.0),
    Column(
        "run", 4, lambda row: wording.short(row.view.running), lambda row: row.view.running or 0.0
    ),
    Column(
        "wait",
        4,
        lambda row: wording.short(row.view.waiting),
        lambda row: row.view.waiting or 0.0,
        style=lambda row: "warn" if row.view.waiting else "",
    ),
    Column(
        "KV",
        4,
        lambda row: wording.percent(row.view.kv_usage, 0),
        lambda row: row.view.kv_usage or 0.0,
    ),
    Column(
        "hits",
        4,
        lambda row: wording.percent(row.view.prefix_hit_rate, 0),
        lambda row: row.view.prefix_hit_rate or 0.0,
        spare=3,
    ),
    _median("TTFT"),
    _median("ITL"),
    Column(
        "why slow",
        9,
        lambda row: row.diagnosis.kind,
        lambda row: row.diagnosis.level,
        left=True,
        style=lambda row: row.diagnosis.style,
    ),
    Column(
        "generation over time",
        40,
        _rate,
        lambda row: row.view.mean_generation_rate or 0.0,
        left=True,
        spare=6,
        most=400,
        draw=_trend,
    ),
)


class ServersPage(Page):
    """All servers. Enter focuses on one."""

    title = "Servers"
    keys = (("Enter", "Focus"), ("s", "Sort"), ("/", "Filter"))
    is_time_dependent = False

    def __init__(self) -> None:
        self.listing: Listing[ServerRow] = Listing(
            COLUMNS,
            lambda row: row.server.url,
            lambda row: f"{row.server.name} {row.view.model}",
            sort=None,
        )

    def show(self, state: State) -> None:
        self.listing.show([_row(state, server) for server in state.servers])

    def draw(self, state: State, width: int, height: int) -> Block:
        """Draw the table, and below it the error of the server under the cursor."""
        row = self.listing.current
        error: Block = (
            [[], [(row.server.error, "bad")]] if row is not None and row.server.error else []
        )
        return self.listing.draw(width, height - len(error)) + error


def _row(state: State, server: Server) -> ServerRow:
    view = view_of([server])
    is_stale = state.is_stale(server)
    if server.last_attempt is None:
        status = "..."
    elif not is_stale:
        status = "up"
    elif server.last is None:
        status = "no answer"
    else:
        status = f"stale {wording.duration(state.age(server))}"
    return ServerRow(server, view, diagnose(server, view), status, is_stale)
