"""Requests page: the table of live requests, and one request in detail."""

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.top import wording
from toolkit.top.drawing.draw import bar, sparkline
from toolkit.top.drawing.listing import Column, Listing, text_column
from toolkit.top.drawing.paint import Block, Line, cut_middle, wrap
from toolkit.top.pages.page import Page
from toolkit.top.readings.arithmetic import Latency
from toolkit.top.readings.reading import LiveRequest
from toolkit.top.readings.server import Server
from toolkit.top.state import State
from toolkit.top.view import View

STATES = {"running": "good", "waiting": "warn", "preempted": "bad", "swapped": "bad"}
KEYS = (("Enter", "Open"), ("x", "End"), ("s", "Sort"), ("/", "Filter"))
ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-", "transcr-")


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A live request and its server."""

    server: Server
    request: LiveRequest

    @property
    def name(self) -> str:
        """Key of the row in the table."""
        return f"{self.server.url} {self.request.id}"

    @property
    def short_id(self) -> str:
        """Request id without its prefix."""
        for prefix in ID_PREFIXES:
            if self.request.id.startswith(prefix):
                return self.request.id.removeprefix(prefix)
        return self.request.id


def columns(*, several: bool, adapters: bool = False) -> list[Column[RequestRow]]:
    """Return the columns of the table, with the server or the adapter if there are several."""
    server: Column[RequestRow] = text_column(
        "server",
        9,
        lambda row: row.server.name,
        most=24,
        draw=lambda row, width: [(cut_middle(row.server.name, width), "")],
    )
    adapter: Column[RequestRow] = text_column(
        "adapter", 9, lambda row: row.request.adapter, spare=3, most=24
    )
    return [
        text_column("id", 10, lambda row: row.short_id, most=46),
        *([server] if several else []),
        Column("age", 7, lambda row: wording.seconds(row.request.age), lambda row: row.request.age),
        text_column(
            "state",
            9,
            lambda row: row.request.state,
            style=lambda row: STATES.get(row.request.state, ""),
        ),
        _count("prompt", 6, "num_prompt_tokens"),
        _count("cached", 6, "num_cached_tokens", spare=1),
        _count("output", 6, "num_output_tokens"),
        Column(
            "tok/s",
            6,
            lambda row: wording.decimal(row.request.tokens_per_second),
            lambda row: row.request.tokens_per_second,
        ),
        _count("blocks", 6, "num_blocks", spare=3),
        _count("pre", 4, "num_preemptions", spare=2),
        _count("prio", 4, "priority", spare=4),
        *([adapter] if adapters else []),
        text_column("client", 11, lambda row: row.request.origin, spare=1, most=28),
        Column(
            "cached, prompt, output",
            24,
            lambda row: row.short_id,
            lambda row: row.request.num_prompt_tokens,
            left=True,
            spare=5,
            most=400,
            draw=_composition,
        ),
    ]


def _composition(row: RequestRow, width: int) -> Line:
    """Draw the shares of cached, computed and generated tokens."""
    request = row.request
    prompt, cached = request.num_prompt_tokens, request.num_cached_tokens
    total = max(1, prompt + request.num_output_tokens)
    first, second = (round(width * part / total) for part in (cached, prompt))
    return [
        ("▁" * first, "kv"),
        ("▃" * (second - first), "prompt"),
        ("▅" * (width - second), "gen"),
    ]


def _count(title: str, width: int, name: str, spare: int = 0) -> Column[RequestRow]:
    def value(row: RequestRow) -> float:
        return float(getattr(row.request, name))

    return Column(title, width, lambda row: wording.short(value(row)), value, spare=spare)


class RequestsPage(Page):
    """Live requests of the shown servers. Enter opens one, x ends it."""

    title = "Requests"
    needs_requests = True

    def __init__(self, *, several: bool) -> None:
        self._several = several
        self.listing: Listing[RequestRow] = Listing(
            columns(several=several),
            lambda row: row.name,
            lambda row: (
                f"{row.request.id} {row.request.state} {row.request.origin} {row.request.adapter} "
                f"{row.server.name}"
            ),
            sort="age",
            empty="No live requests.",
        )

    def show(self, state: State) -> None:
        rows = [
            RequestRow(server, request)
            for server in state.shown_servers
            for request in server.requests or ()
        ]
        has_adapters = any(row.request.adapter for row in rows)
        self.listing.columns = columns(several=self._several, adapters=has_adapters)
        self.listing.show(rows)
        self.keys = (
            KEYS if any(server.requests is not None for server in state.shown_servers) else ()
        )

    def draw(self, state: State, width: int, height: int) -> Block:
        """Draw the table, below a note on each server that does not list requests."""
        servers = state.shown_servers
        silent = [server for server in servers if server.requests is None and server.no_requests]
        notes: Block = []
        for server in silent:
            name = f"{server.name}: " if len(servers) > 1 else ""
            notes += [[(line, "warn")] for line in wrap(name + server.no_requests, width, 2)]
        if silent and len(silent) == len(servers):
            return [[], *notes, [], *summary(state.view)]
        self.listing.above = len(notes)
        return notes + self.listing.draw(width, height - len(notes))

    def find(self, name: str) -> RequestRow | None:
        """Return the row of that name if the request is still live."""
        return next((row for row in self.listing.rows if row.name == name), None)


def summary(view: View) -> Block:
    """Draw metrics of all requests, for servers that do not list them."""
    tpot, ttft, e2e = (view.latencies.get(name) for name in ("TPOT", "TTFT", "E2E"))
    speed = 1.0 / tpot.mean if tpot is not None and tpot.mean else None

    def times(latency: Latency | None) -> Line:
        p50, p99 = (None, None) if latency is None else (latency.p50, latency.p99)
        return [(wording.seconds(p50), "value"), (f" p50, {wording.seconds(p99)} p99", "dim")]

    return [
        [("All requests, ", "title"), (wording.span(view.span), "title")],
        _fact("running", (wording.count(view.running), "value")),
        _fact("waiting", (wording.count(view.waiting), "value warn" if view.waiting else "value")),
        _fact(
            "finished",
            (wording.decimal(view.mean_finished_rate), "value"),
            (f" per second; since the start: {wording.reasons(view.finished)}", "dim"),
        ),
        _fact(
            "prompts", (wording.decimal(view.prompt_tokens), "value"), (" tokens on average", "dim")
        ),
        _fact(
            "answers", (wording.decimal(view.output_tokens), "value"), (" tokens on average", "dim")
        ),
        _fact("speed", (wording.decimal(speed), "value"), (" tok/s per request", "dim")),
        _fact("first token", *times(ttft)),
        _fact("end to end", *times(e2e)),
    ]


def _fact(name: str, *value: tuple[str, str]) -> Line:
    return [(f"{name:<13}", "dim"), *value]


def details(row: RequestRow, speeds: Sequence[float], width: int) -> Block:
    """Draw one request. `speeds`: its tokens per second at each reading since it was opened."""
    request = row.request
    cached = (
        request.num_cached_tokens / request.num_prompt_tokens if request.num_prompt_tokens else None
    )
    size = width - 24
    prompt = f"{wording.count(request.num_prompt_tokens)} tokens"
    return [
        _fact("id", (request.id, "value")),
        _fact("server", (row.server.name, "")),
        _fact("client", (request.origin or wording.NOTHING, "")),
        _fact("state", (request.state, STATES.get(request.state, ""))),
        _fact("age", (wording.seconds(request.age), "")),
        _fact("answers", (wording.count(request.n), "")),
        _fact("priority", (wording.count(request.priority), "")),
        [],
        _fact("prompt", (prompt, "")),
        _fact("from cache", *bar(cached, size), (f"{wording.percent(cached, 0):>6}", "value")),
        _fact("output", (f"{wording.count(request.num_output_tokens)} tokens", "")),
        _fact(
            "speed",
            (f"{wording.decimal(request.tokens_per_second)} tok/s", "value"),
            (" on average", "dim"),
        ),
        _fact("over time", *sparkline(speeds, size + 6)),
        _fact("KV blocks", (wording.count(request.num_blocks), "")),
        _fact(
            "preempted",
            (wording.count(request.num_preemptions), "bad" if request.num_preemptions else ""),
        ),
    ]
