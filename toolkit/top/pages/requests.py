"""The page of live requests: the table, and one request in full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from toolkit.top import wording
from toolkit.top.drawing.draw import bar, spark
from toolkit.top.drawing.listing import Column, Listing
from toolkit.top.drawing.paint import Block, Line, squeeze, wrap
from toolkit.top.pages.page import Page
from toolkit.top.readings.arithmetic import Latency
from toolkit.top.readings.reading import LiveRequest
from toolkit.top.readings.server import Server
from toolkit.top.state import State
from toolkit.top.view import View

STATES = {"running": "good", "waiting": "warn", "preempted": "bad", "swapped": "bad"}
KEYS = (("Enter", "Open"), ("x", "End"), ("s", "Sort"), ("/", "Filter"))
NAMES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "embd-")
"""Beginnings of ids, which tell nothing apart."""


@dataclass(frozen=True, slots=True)
class Row:
    """A request, and the server that has it."""

    server: Server
    request: LiveRequest

    @property
    def name(self) -> str:
        """What tells it apart."""
        return f"{self.server.url} {self.request.id}"

    @property
    def short_id(self) -> str:
        """Its id without what all have."""
        for beginning in NAMES:
            if self.request.id.startswith(beginning):
                return self.request.id.removeprefix(beginning)
        return self.request.id


def columns(*, several: bool) -> list[Column[Row]]:
    """The table's; with the server, where there are several."""
    server: list[Column[Row]] = [
        Column("server", 9, lambda row: row.server.name, lambda row: row.server.name, left=True, descending=False, most=24,
               draw=lambda row, width: [(squeeze(row.server.name, width), "")]),
    ]  # fmt: skip
    return [
        Column("id", 10, lambda row: row.short_id, lambda row: row.short_id, left=True, descending=False, most=46),
        *(server if several else []),
        Column("age", 7, lambda row: wording.seconds(row.request.age), lambda row: row.request.age),
        Column(
            "state",
            9,
            lambda row: row.request.state,
            lambda row: row.request.state,
            left=True,
            descending=False,
            style=lambda row: STATES.get(row.request.state, ""),
        ),
        _count("prompt", 6, "num_prompt_tokens"),
        _count("cached", 6, "num_cached_tokens", spare=1),
        _count("output", 6, "num_output_tokens"),
        Column(
            "tok/s", 6, lambda row: wording.decimal(row.request.tokens_per_second), lambda row: row.request.tokens_per_second
        ),
        _count("blocks", 6, "num_blocks", spare=3),
        _count("pre", 4, "num_preemptions", spare=2),
        _count("prio", 4, "priority", spare=4),
        Column("client", 11, lambda row: row.request.origin, lambda row: row.request.origin, left=True, descending=False,
               spare=1, most=28),
        Column("cached, prompt, output", 24, lambda row: row.short_id, lambda row: row.request.num_prompt_tokens, left=True,
               spare=5, most=400, draw=_composition),
    ]  # fmt: skip


def _composition(row: Row, width: int) -> Line:
    """What a request's tokens are: found in the cache, computed, generated."""
    request = row.request
    cached, computed = (
        request.num_cached_tokens,
        request.num_prompt_tokens - request.num_cached_tokens,
    )
    total = max(1, request.num_prompt_tokens + request.num_output_tokens)
    first, second = (round(width * part / total) for part in (cached, cached + computed))
    return [
        ("▁" * first, "kv"),
        ("▃" * (second - first), "prompt"),
        ("▅" * (width - second), "gen"),
    ]


def _count(title: str, width: int, name: str, spare: int = 0) -> Column[Row]:
    def value(row: Row) -> float:
        return float(getattr(row.request, name))

    return Column(title, width, lambda row: wording.short(value(row)), value, spare=spare)


class RequestsPage(Page):
    """The live requests of the servers that are looked at; Enter shows one in full, x ends it."""

    title = "Requests"
    wants_requests = True

    def __init__(self, *, several: bool) -> None:
        self.listing: Listing[Row] = Listing(
            columns(several=several),
            lambda row: row.name,
            lambda row: (
                f"{row.request.id} {row.request.state} {row.request.origin} {row.server.name}"
            ),
            sort="age",
            empty="No request is live.",
        )

    def show(self, state: State) -> None:
        """See Page."""
        self.listing.show(
            [
                Row(server, request)
                for server in state.looked_at
                for request in server.requests or ()
            ]
        )
        self.keys = KEYS if any(server.requests is not None for server in state.looked_at) else ()

    def draw(self, state: State, width: int, height: int) -> Block:
        """The table, under what has to be said of servers that do not tell."""
        servers = state.looked_at
        silent = [server for server in servers if server.requests is None and server.no_requests]
        said: Block = []
        for server in silent:
            name = f"{server.name}: " if len(servers) > 1 else ""
            said += [[(line, "warn")] for line in wrap(name + server.no_requests, width, 2)]
        if silent and len(silent) == len(servers):
            return [[], *said, [], *of_all(state.view)]
        self.listing.above = len(said)
        return said + self.listing.draw(width, height - len(said))

    def find(self, name: str) -> Row | None:
        """The row of that name, if it still lives."""
        return next((row for row in self.listing.rows if row.name == name), None)


def of_all(view: View) -> Block:
    """What metrics tell of all requests together, where nobody tells of each."""
    tpot, ttft, e2e = (view.latencies.get(name) for name in ("TPOT", "TTFT", "E2E"))
    speed = 1.0 / tpot.mean if tpot is not None and tpot.mean else None

    def times(latency: Latency | None) -> Line:
        p50, p99 = (None, None) if latency is None else (latency.p50, latency.p99)
        return [(wording.seconds(p50), "value"), (f" p50, {wording.seconds(p99)} p99", "dim")]

    return [
        [("All together, ", "title"), (wording.span(view.span), "title")],
        _fact("running", (wording.count(view.running), "value")),
        _fact("waiting", (wording.count(view.waiting), "value warn" if view.waiting else "value")),
        _fact(
            "finished",
            (wording.decimal(view.mean_finished_rate), "value"),
            (f" in a second; since the start: {wording.reasons(view.finished)}", "dim"),
        ),
        _fact(
            "prompts", (wording.decimal(view.prompt_tokens), "value"), (" tokens on average", "dim")
        ),
        _fact(
            "answers", (wording.decimal(view.output_tokens), "value"), (" tokens on average", "dim")
        ),
        _fact("speed", (wording.decimal(speed), "value"), (" tok/s for each", "dim")),
        _fact("first token", *times(ttft)),
        _fact("whole answer", *times(e2e)),
    ]


def _fact(name: str, *value: tuple[str, str]) -> Line:
    return [(f"{name:<13}", "dim"), *value]


def details(row: Row, speeds: Sequence[float], width: int) -> Block:
    """One request in full. `speeds`: its tokens per second at each reading since it is looked at."""
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
        _fact("last while", *spark(speeds, size + 6)),
        _fact("KV blocks", (wording.count(request.num_blocks), "")),
        _fact(
            "preempted",
            (wording.count(request.num_preemptions), "bad" if request.num_preemptions else ""),
        ),
    ]
