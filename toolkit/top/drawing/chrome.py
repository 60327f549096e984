"""Frame of every page: title, tabs, bottleneck and keys."""

import time
from collections.abc import Sequence

from toolkit.top import wording
from toolkit.top.drawing.paint import Block, Line, fit, spread, width_of, wrap
from toolkit.top.pages.page import Page
from toolkit.top.state import State

COMMON_KEYS = (("?", "Help"), ("p", "Pause"), ("q", "Quit"))
LABEL = 10  # columns of the labels of the bottleneck


def title_line(state: State, width: int) -> Line:
    """Draw the server in focus, or all, and the state of the readings."""
    left: Line = [(" tk top ", "title"), (" ", "")]
    right = _status(state)
    for part in _subject(state):
        if width_of([*left, part, *right]) < width:
            left.append(part)
    return spread(left, right, width)


def _subject(state: State) -> Line:
    """Describe the server, the most important part first."""
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
    """Return the time of the newest reading, in seconds since 1970."""
    last = state.focus.last if state.focus is not None else None
    return last.wall if last is not None else time.time()


def _status(state: State) -> Line:
    record: Line = [("● rec  ", "bad")] if state.is_recording else []
    if state.has_ended:
        return [*record, ("■ end of the recording ", "warn")]
    if state.is_paused:
        return [*record, ("❚❚ paused ", "warn")]
    if state.all_stale:
        known = [state.age(server) for server in state.shown_servers if server.last is not None]
        if known:
            return [*record, (f"✖ stale, {wording.duration(min(known))} old ", "bad")]
        tried = any(server.last_attempt is not None for server in state.shown_servers)
        return [*record, ("✖ no answer ", "bad") if tried else ("… connecting ", "warn")]
    return [*record, ("● ", "good"), (f"every {state.interval:g} s ", "dim")]


def tab_line(pages: Sequence[Page], current: Page, width: int) -> Line:
    """Draw the tabs, and the filter and number of rows of the current page's table."""
    line: Line = []
    for number, page in enumerate(pages, start=1):
        line.append((f" {number} {page.title} ", "tab-on" if page is current else "tab"))
    listing = current.listing
    if listing is None:
        return line
    shown = f"{len(listing.rows)} of {listing.num_all}" if listing.filter else f"{listing.num_all}"
    note: Line = [(f"/{listing.filter}  ", "flag")] if listing.filter else []
    return spread(line, [*note, (f"{shown} ", "dim")], width)


def tab_at(pages: Sequence[Page], x: int) -> Page | None:
    """Return the page of the tab in column `x`."""
    right = 0
    for number, page in enumerate(pages, start=1):
        right += len(f" {number} {page.title} ")
        if x < right:
            return page
    return None


def bottleneck_lines(state: State, width: int, height: int) -> Block:
    """Draw the bottleneck and the flag to change, or why there are no numbers."""
    errors = [server.error for server in state.shown_servers if server.error]
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
    text: Line = [
        (f"{'why slow':>{LABEL - 1}} ", "dim"),
        (f"{found.kind}: ", found.style),
        (found.text, ""),
    ]
    advice: Line = (
        [(f"{'try':>{LABEL - 1}} ", "dim"), (found.advice, "flag")] if found.advice else []
    )
    if not advice and width_of(text) > width:
        lines = wrap(f"{found.kind}: {found.text}", width - LABEL - 1, height)
        return [[(" " * LABEL, ""), (line, "")] for line in lines]
    return [fit(text, width), fit(advice, width)]


def key_line(page: Page, state: State, width: int) -> Line:
    """Draw the keys of the page. A narrow screen drops the last ones."""
    own = [*page.keys]
    if state.focus is not None and len(state.servers) > 1:
        own.append(("Esc", "All servers"))
    line: Line = [(" ", "")]
    for key, does in (*own, *COMMON_KEYS, ("+ -", "Interval"), ("t", "Theme"), ("^p", "Commands")):
        if width_of(line) + len(key) + len(does) + 3 > width:
            break
        line += [(key, "key"), (f" {does}  ", "dim")]
    return line
