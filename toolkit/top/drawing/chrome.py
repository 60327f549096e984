"""What frames every page: the title, the tabs, the reason why it is slow, and the keys."""

from __future__ import annotations

import time
from collections.abc import Sequence

from toolkit.top import wording
from toolkit.top.drawing.paint import Block, Line, ends, fit, width_of, wrap
from toolkit.top.pages.page import Page
from toolkit.top.state import State

COMMON_KEYS = (("?", "Help"), ("p", "Pause"), ("q", "Quit"))
LABEL = 10
"""Columns of what stands left in the lines of the reason."""


def title(state: State, width: int) -> Line:
    """Who is looked at, and how things stand with the looking."""
    left: Line = [(" tk top ", "title"), (" ", "")]
    right = _how(state)
    for part in _who(state):
        if width_of([*left, part, *right]) < width:
            left.append(part)
    return ends(left, right, width)


def _who(state: State) -> Line:
    """The most telling first."""
    view = state.view
    if state.focus is None:
        answering = sum(server.is_up for server in state.servers)
        return [
            (f"{len(state.servers)} servers", "bold"),
            (f", {answering} answer", "dim" if answering == len(state.servers) else "warn"),
        ]
    name: Line = [(state.focus.name, "bold")]
    if view.model:
        name = [(view.model, "bold"), (f"  {state.focus.name}", "dim")]
    version: Line = [(f"  version {view.version}", "dim")] if view.version else []
    since = view.start_time
    up: Line = (
        [(f"  up {wording.duration(_now(state) - since)}", "dim")] if since is not None else []
    )
    return [*name, *version, *up]


def _now(state: State) -> float:
    """Seconds since 1970 by the clock of the readings."""
    last = state.focus.last if state.focus is not None else None
    return last.wall if last is not None else time.time()


def _how(state: State) -> Line:
    record: Line = [("● rec  ", "bad")] if state.is_recording else []
    if state.has_ended:
        return [*record, ("■ end of the recording ", "warn")]
    if state.is_paused:
        return [*record, ("❚❚ paused ", "warn")]
    if state.all_stale:
        known = [state.age(server) for server in state.looked_at if server.last is not None]
        if known:
            return [*record, (f"✖ stale, {wording.duration(min(known))} old ", "bad")]
        tried = any(server.tried is not None for server in state.looked_at)
        return [*record, ("✖ no answer ", "bad") if tried else ("… connecting ", "warn")]
    return [*record, ("● ", "good"), (f"every {state.interval:g} s ", "dim")]


def tabs(pages: Sequence[Page], current: Page, width: int) -> Line:
    """The pages by number, and what the table of this one is filtered by."""
    line: Line = []
    for number, page in enumerate(pages, start=1):
        line.append((f" {number} {page.title} ", "tab-on" if page is current else "tab"))
    listing = current.listing
    if listing is None:
        return line
    shown = f"{len(listing.rows)} of {listing.num_all}" if listing.filter else f"{listing.num_all}"
    note: Line = [(f"/{listing.filter}  ", "flag")] if listing.filter else []
    return ends(line, [*note, (f"{shown} ", "dim")], width)


def tab_at(pages: Sequence[Page], x: int) -> Page | None:
    """The page whose tab is in column `x`."""
    right = 0
    for number, page in enumerate(pages, start=1):
        right += len(f" {number} {page.title} ")
        if x < right:
            return page
    return None


def why(state: State, width: int, height: int) -> Block:
    """The bottleneck, and the flag to change; or why there are no numbers."""
    errors = [server.error for server in state.looked_at if server.error]
    if errors and state.all_stale and not state.has_ended:
        lines = wrap(
            f"{errors[0]} Trying again every {max(1.0, state.interval):g} s.",
            width - LABEL - 1,
            height,
        )
        return [
            [(f"{'no answer' if not i else '':>{LABEL - 1}} ", "bad"), (line, "")]
            for i, line in enumerate(lines)
        ]
    found = state.diagnosis
    said: Line = [
        (f"{'why slow':>{LABEL - 1}} ", "dim"),
        (f"{found.kind}: ", found.style),
        (found.text, ""),
    ]
    advice: Line = (
        [(f"{'try':>{LABEL - 1}} ", "dim"), (found.advice, "flag")] if found.advice else []
    )
    if not advice and width_of(said) > width:
        lines = wrap(f"{found.kind}: {found.text}", width - LABEL - 1, height)
        return [[(" " * LABEL, ""), (line, "")] for line in lines]
    return [fit(said, width), fit(advice, width)]


def keys(page: Page, state: State, width: int) -> Line:
    """The keys that do something here; the last ones give way on a narrow screen."""
    own = [*page.keys]
    if state.focus is not None and len(state.servers) > 1:
        own.append(("Esc", "All servers"))
    line: Line = [(" ", "")]
    for key, does in (*own, *COMMON_KEYS, ("+ -", "Interval"), ("t", "Theme"), ("^p", "Commands")):
        if width_of(line) + len(key) + len(does) + 3 > width:
            break
        line += [(key, "key"), (f" {does}  ", "dim")]
    return line
