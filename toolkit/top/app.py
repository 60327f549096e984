"""The screen of `tk top`, and what the keys do."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input

from toolkit.errors import ToolkitError
from toolkit.top.dialogs import RequestDialog, help_dialog, question
from toolkit.top.drawing import chrome
from toolkit.top.drawing.paint import Block
from toolkit.top.drawing.palette import DARK, LIGHT, THEMES, Palette
from toolkit.top.drawing.widgets import Painted
from toolkit.top.keys import BINDINGS
from toolkit.top.pages.latency import LatencyPage
from toolkit.top.pages.overview import OverviewPage
from toolkit.top.pages.page import Page
from toolkit.top.pages.requests import RequestsPage, Row
from toolkit.top.pages.servers import ServersPage
from toolkit.top.pages.settings import SettingsPage
from toolkit.top.readings.reader import Reader
from toolkit.top.readings.recording import Recorder
from toolkit.top.state import State

REDRAW = 0.04
"""Seconds after a reading, in which those of other servers come."""
INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PLAIN = "ansi-dark"
"""Textual's theme for NO_COLOR: the terminal's own foreground and background."""
WHEEL = 3
"""Rows that the wheel of a mouse moves."""
MARGIN = 1
"""Columns left and right of a page."""


class TopApp(App[None]):
    """Reads every server of the state each `state.interval` seconds, and shows one of five pages."""

    CSS = """
    Screen { layout: vertical; }
    #title, #tabs, #keys { height: 1; }
    #title, #why, #keys { background: $surface; }
    #why { height: 2; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: $surface; }
    #filter.open { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = BINDINGS
    TITLE = "tk top"
    AUTO_FOCUS = None
    NOTIFICATION_TIMEOUT = 3

    def __init__(
        self, state: State, *, theme: str = "dark", recorder: Recorder | None = None
    ) -> None:
        # Asked for here, NO_COLOR takes Textual's own colors away, too; else they become grey.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.state = state
        self.reader = Reader(state, recorder, self._redraw_soon, self._fail)
        self.failure: BaseException | None = None
        """What has ended the screen, when it was not the user."""
        self.animation_level = "none"
        for one in THEMES.values():
            self.register_theme(one)
        self.theme = PLAIN if self.no_color else f"tk-{theme}"
        self.palette = self._palette()
        state.colors = self.palette.has_colors
        state.is_recording = recorder is not None
        self.requests_page = RequestsPage(several=len(state.servers) > 1)
        self.servers_page = ServersPage()
        self.pages: list[Page] = [
            OverviewPage(),
            self.requests_page,
            LatencyPage(),
            self.servers_page,
            SettingsPage(),
        ]
        self.page = self.pages[0]
        self._will_redraw = False

    def compose(self) -> ComposeResult:
        """See App."""
        yield Painted(lambda width, _: [chrome.title(self.state, width)], id="title")
        yield Painted(
            lambda width, _: [chrome.tabs(self.pages, self.page, width)],
            id="tabs",
            clicked=self._click_tab,
        )
        yield Painted(self._draw_page, id="body", clicked=self._click_row)
        yield Painted(lambda width, height: chrome.why(self.state, width, height), id="why")
        yield Painted(lambda width, _: [chrome.keys(self.page, self.state, width)], id="keys")
        yield Input(placeholder="Show only rows that contain ...", id="filter", compact=True)

    def on_mount(self) -> None:
        """Begins to read."""
        self.redraw()
        self.reader.start()
        self.set_interval(1.0, self._grow_old)

    async def on_unmount(self) -> None:
        """Lets go of the servers."""
        await self.reader.close()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.exit()

    def _redraw_soon(self) -> None:
        """Once for all servers that answer at about the same time."""
        if not self._will_redraw:
            self._will_redraw = True
            self.set_timer(REDRAW, self.redraw)

    def _grow_old(self) -> None:
        """Numbers do so without anything being read."""
        if not self.state.is_paused and any(
            self.state.is_stale(server) for server in self.state.servers
        ):
            self.redraw()

    def redraw(self) -> None:
        """Computes the numbers anew, and shows them."""
        self._will_redraw = False
        self.state.refresh()
        self.page.show(self.state)
        self.repaint()

    def repaint(self) -> None:
        """Shows what is known. All of it: titles and keys tell of the page, dialogs of its rows."""
        for screen in self.screen_stack:
            for painted in screen.query(Painted):
                painted.repaint()

    def _draw_page(self, width: int, height: int) -> Block:
        made = self.page.draw(self.state, width - 2 * MARGIN, height)
        if self.page.shows_age and self.state.all_stale:
            made = [[(text, "stale") for text, _ in line] for line in made]
        return [[(" " * MARGIN, ""), *line] for line in made]

    def _palette(self) -> Palette:
        if self.no_color:
            return Palette(None)
        return Palette(DARK if self.current_theme.dark else LIGHT)

    def _click_tab(self, x: int, _: int) -> None:
        page = chrome.tab_at(self.pages, x)
        if page is not None:
            self._turn_to(page)

    def _click_row(self, _: int, y: int) -> None:
        if self.page.listing is not None:
            self.page.listing.point_at(y)
            self.repaint()

    def on_mouse_scroll_down(self) -> None:
        """The cursor down."""
        self.action_move(WHEEL)

    def on_mouse_scroll_up(self) -> None:
        """The cursor up."""
        self.action_move(-WHEEL)

    def _turn_to(self, page: Page) -> None:
        self._close_filter()
        self.page = page
        self.reader.wants_requests = page.wants_requests
        if page.wants_requests:
            self.reader.read_now()
        self.redraw()

    def action_page(self, number: int) -> None:
        """Turns to a page."""
        self._turn_to(self.pages[number - 1])

    def action_next_page(self, by: int) -> None:
        """The next page, or the one before."""
        if len(self.screen_stack) == 1:
            self._turn_to(self.pages[(self.pages.index(self.page) + by) % len(self.pages)])

    def action_turn(self, by: int) -> None:
        """Another part of the page; of a page that is all there, the next page."""
        if self.page.turn(by):
            self.repaint()
        else:
            self.action_next_page(by)

    def action_pause(self) -> None:
        """Stops reading, or goes on."""
        self.state.is_paused = not self.state.is_paused
        self.reader.read_now()
        self.repaint()

    def action_interval(self, by: int) -> None:
        """The next longer interval, or the next shorter one."""
        now = self.state.interval
        others = (
            [one for one in INTERVALS if one > now]
            if by > 0
            else [one for one in INTERVALS if one < now][::-1]
        )
        if others:
            self.state.interval = others[0]
        self.reader.read_now()
        self.repaint()

    def action_move(self, by: int) -> None:
        """The cursor down or up."""
        if self.page.listing is not None:
            self.page.listing.move(by)
            self.repaint()

    def action_move_page(self, by: int) -> None:
        """The cursor by a screen."""
        if self.page.listing is not None:
            self.page.listing.move_page(by)
            self.repaint()

    def action_sort(self) -> None:
        """By the next column."""
        if self.page.listing is not None:
            self.page.listing.sort_next()
            self.redraw()

    def action_reverse(self) -> None:
        """The other way round."""
        if self.page.listing is not None:
            self.page.listing.reverse()
            self.redraw()

    def action_filter(self) -> None:
        """Asks for what rows must contain."""
        if self.page.listing is not None:
            field = self.query_one("#filter", Input)
            field.value = self.page.listing.filter
            field.add_class("open")
            self.query_one("#keys").display = False
            field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while it is typed."""
        if self.page.listing is not None and event.input.has_class("open"):
            self.page.listing.filter = event.value
            self.redraw()

    def on_input_submitted(self) -> None:
        """Back to the table, which stays filtered."""
        self._close_filter()

    def _close_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.remove_class("open")
        self.query_one("#keys").display = True
        self.set_focus(None)

    def action_leave(self) -> None:
        """Out of the filter, then to all servers."""
        self._close_filter()
        if self.page.listing is not None and self.page.listing.filter:
            self.page.listing.filter = ""
        elif len(self.state.servers) > 1:
            self.state.focus = None
        self.redraw()

    def action_open(self) -> None:
        """A request in full, or a server alone."""
        row = self.page.listing.current if self.page.listing is not None else None
        if isinstance(row, Row):
            self.push_screen(RequestDialog(self.requests_page, row))
        elif self.page is self.servers_page and row is not None:
            self.state.focus = row.server
            self._turn_to(self.pages[0])

    def action_abort(self) -> None:
        """Ends the request under the cursor, or that which is open, after asking."""
        row = (
            self.screen.row
            if isinstance(self.screen, RequestDialog)
            else self.requests_page.listing.current
        )
        if row is None or self.page is not self.requests_page:
            return

        def answered(yes: bool | None) -> None:
            if yes:
                self.run_worker(self._abort(row))

        text = f"{row.request.id} of {row.request.origin or 'an unknown client'}: its client gets what there is."
        self.push_screen(
            question("End this request?", text, "Enter ends it, Esc goes back"), answered
        )

    async def _abort(self, row: Row) -> None:
        try:
            await self.state.source_of(row.server).abort(row.request.id)
        except ToolkitError as error:
            self.notify(error.message, severity="error", markup=False)
            return
        self.notify(f"{row.request.id} has been ended.", markup=False)
        self.reader.read_now()

    def action_help(self) -> None:
        """What the keys do."""
        self.push_screen(help_dialog())

    def action_theme(self) -> None:
        """Light or dark."""
        if not self.no_color:
            self.theme = "tk-light" if self.current_theme.dark else "tk-dark"
            self.palette = self._palette()
            self.repaint()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What Ctrl-P lists."""
        for number, page in enumerate(self.pages, start=1):
            yield SystemCommand(page.title, f"Page {number}", partial(self.action_page, number))
        for title, does, action in (
            ("Pause", "Stop reading, or go on", self.action_pause),
            ("Look less often", "A longer interval", partial(self.action_interval, 1)),
            ("Look more often", "A shorter interval", partial(self.action_interval, -1)),
            ("Sort", "By the next column", self.action_sort),
            ("Reverse", "Sort the other way round", self.action_reverse),
            ("Filter", "Show only rows that contain ...", self.action_filter),
            ("End request", "The one under the cursor, after asking", self.action_abort),
            ("All servers", "Look at all servers together", self.action_leave),
            ("Theme", "Light or dark", self.action_theme),
            ("Help", "What the keys do", self.action_help),
            ("Quit", "Leave tk top", self.exit),
        ):
            yield SystemCommand(title, does, action)
