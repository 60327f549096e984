"""The dashboard application: layout, actions of the keys, and redrawing."""

import os
from collections.abc import Iterable
from functools import partial
from typing import ClassVar

from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input

from toolkit.errors import ToolkitError
from toolkit.logs import escape_line
from toolkit.top.dialogs import RequestDialog, help_dialog, question
from toolkit.top.drawing import chrome
from toolkit.top.drawing.paint import Block
from toolkit.top.drawing.palette import DARK, LIGHT, THEMES, Palette
from toolkit.top.drawing.widgets import Canvas
from toolkit.top.keys import BINDINGS
from toolkit.top.pages.latency import LatencyPage
from toolkit.top.pages.overview import OverviewPage
from toolkit.top.pages.page import Page
from toolkit.top.pages.requests import RequestRow, RequestsPage
from toolkit.top.pages.servers import ServersPage
from toolkit.top.pages.settings import SettingsPage
from toolkit.top.readings.reader import Reader
from toolkit.top.readings.recording import RecordingWriter
from toolkit.top.state import State

REDRAW_DELAY = 0.04  # seconds after a reading, in which readings of other servers arrive
INTERVALS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
PLAIN = "ansi-dark"  # Textual's theme for NO_COLOR: the terminal's foreground and background
WHEEL = 3  # rows per step of the mouse wheel
MARGIN = 1  # columns left and right of a page


class TopApp(App[None]):
    """Reads every server each `state.interval` seconds and shows one of five pages."""

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
        self, state: State, *, theme: str = "dark", recorder: RecordingWriter | None = None
    ) -> None:
        # With ansi_color, NO_COLOR removes Textual's own colors too; without it they become grey.
        super().__init__(ansi_color=True if "NO_COLOR" in os.environ else None)
        self.state = state
        self.reader = Reader(state, recorder, self._schedule_redraw, self._fail)
        self.failure: BaseException | None = None  # error that ended the app
        self.animation_level = "none"
        for one in THEMES.values():
            self.register_theme(one)
        self.theme = PLAIN if self.no_color else f"tk-{theme}"
        self.palette = self._palette()
        state.has_colors = self.palette.has_colors
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
        self._is_redraw_due = False

    def compose(self) -> ComposeResult:
        yield Canvas(lambda width, _: [chrome.title_line(self.state, width)], id="title")
        yield Canvas(
            lambda width, _: [chrome.tab_line(self.pages, self.page, width)],
            id="tabs",
            on_position=self._click_tab,
        )
        yield Canvas(self._draw_page, id="body", on_position=self._click_row)
        yield Canvas(
            lambda width, height: chrome.bottleneck_lines(self.state, width, height), id="why"
        )
        yield Canvas(lambda width, _: [chrome.key_line(self.page, self.state, width)], id="keys")
        yield Input(placeholder="Filter: show rows that contain ...", id="filter", compact=True)

    def on_mount(self) -> None:
        self.redraw()
        self.reader.start()
        self.set_interval(1.0, self._redraw_if_stale)

    async def on_unmount(self) -> None:
        await self.reader.close()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self.exit()

    def _schedule_redraw(self) -> None:
        """Redraw once for all servers that answer at about the same time."""
        if not self._is_redraw_due:
            self._is_redraw_due = True
            self.set_timer(REDRAW_DELAY, self.redraw)

    def _redraw_if_stale(self) -> None:
        """Redraw the age of stale numbers, which grows without readings."""
        if not self.state.is_paused and any(
            self.state.is_stale(server) for server in self.state.servers
        ):
            self.redraw()

    def redraw(self) -> None:
        """Compute the numbers from the newest readings and show them."""
        self._is_redraw_due = False
        self.state.refresh()
        self.page.show(self.state)
        self.repaint()

    def repaint(self) -> None:
        """Draw all widgets again: title and keys depend on the page, dialogs on its rows."""
        for screen in self.screen_stack:
            for canvas in screen.query(Canvas):
                canvas.redraw()

    def _draw_page(self, width: int, height: int) -> Block:
        lines = self.page.draw(self.state, width - 2 * MARGIN, height)
        if self.page.is_time_dependent and self.state.all_stale:
            lines = [[(text, "stale") for text, _ in line] for line in lines]
        return [[(" " * MARGIN, ""), *line] for line in lines]

    def _palette(self) -> Palette:
        if self.no_color:
            return Palette(None)
        return Palette(DARK if self.current_theme.dark else LIGHT)

    def _click_tab(self, x: int, _: int) -> None:
        page = chrome.tab_at(self.pages, x)
        if page is not None:
            self._show_page(page)

    def _click_row(self, _: int, y: int) -> None:
        if self.page.listing is not None:
            self.page.listing.point_at(y)
            self.repaint()

    def on_mouse_scroll_down(self) -> None:
        self.action_move(WHEEL)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-WHEEL)

    def _show_page(self, page: Page) -> None:
        self._close_filter()
        self.page = page
        self.reader.needs_requests = page.needs_requests
        if page.needs_requests:
            self.reader.read_now()
        self.redraw()

    def action_page(self, number: int) -> None:
        """Show a page by its number."""
        self._show_page(self.pages[number - 1])

    def action_next_page(self, by: int) -> None:
        """Show the next or previous page, unless a dialog is open."""
        if len(self.screen_stack) == 1:
            self._show_page(self.pages[(self.pages.index(self.page) + by) % len(self.pages)])

    def action_turn(self, by: int) -> None:
        """Show the next or previous part of the page, or the next page if it has no parts."""
        if self.page.turn(by):
            self.repaint()
        else:
            self.action_next_page(by)

    def action_pause(self) -> None:
        """Pause or resume reading."""
        self.state.is_paused = not self.state.is_paused
        self.reader.read_now()
        self.repaint()

    def action_interval(self, by: int) -> None:
        """Use the next longer or shorter interval."""
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
        """Move the cursor down or up by rows."""
        if self.page.listing is not None:
            self.page.listing.move(by)
            self.repaint()

    def action_move_page(self, by: int) -> None:
        """Move the cursor down or up by screens."""
        if self.page.listing is not None:
            self.page.listing.move_page(by)
            self.repaint()

    def action_sort(self) -> None:
        """Sort by the next column."""
        if self.page.listing is not None:
            self.page.listing.sort_next()
            self.redraw()

    def action_reverse(self) -> None:
        """Reverse the order."""
        if self.page.listing is not None:
            self.page.listing.reverse()
            self.redraw()

    def action_filter(self) -> None:
        """Open the filter."""
        if self.page.listing is not None:
            field = self.query_one("#filter", Input)
            field.value = self.page.listing.filter
            field.add_class("open")
            self.query_one("#keys").display = False
            field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter while it is typed."""
        if self.page.listing is not None and event.input.has_class("open"):
            self.page.listing.filter = event.value
            self.redraw()

    def on_input_submitted(self) -> None:
        """Close the filter; the table stays filtered."""
        self._close_filter()

    def _close_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.remove_class("open")
        self.query_one("#keys").display = True
        self.set_focus(None)

    def action_leave(self) -> None:
        """Clear the filter, else show all servers."""
        self._close_filter()
        if self.page.listing is not None and self.page.listing.filter:
            self.page.listing.filter = ""
        elif len(self.state.servers) > 1:
            self.state.focus = None
        self.redraw()

    def action_open(self) -> None:
        """Open the request, or focus on the server, under the cursor."""
        row = self.page.listing.current if self.page.listing is not None else None
        if isinstance(row, RequestRow):
            self.push_screen(RequestDialog(self.requests_page, row))
        elif self.page is self.servers_page and row is not None:
            self.state.focus = row.server
            self._show_page(self.pages[0])

    def action_abort(self) -> None:
        """Ask, then end the open request or the one under the cursor."""
        row = (
            self.screen.row
            if isinstance(self.screen, RequestDialog)
            else self.requests_page.listing.current
        )
        if row is None or self.page is not self.requests_page:
            return

        def on_answer(is_confirmed: bool | None) -> None:
            if is_confirmed:
                self.run_worker(self._abort(row))

        text = (
            f"{row.request.id} of {row.request.origin or 'an unknown client'}. "
            "The client gets the answer so far."
        )
        self.push_screen(question("End this request?", text, "Enter: end, Esc: back"), on_answer)

    async def _abort(self, row: RequestRow) -> None:
        try:
            await self.state.source_of(row.server).abort(row.request.id)
        except ToolkitError as error:
            self.notify(escape_line(error.message), severity="error", markup=False)
            return
        self.notify(escape_line(f"Ended {row.request.id}."), markup=False)
        self.reader.read_now()

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(help_dialog())

    def action_theme(self) -> None:
        """Switch between light and dark."""
        if not self.no_color:
            self.theme = "tk-light" if self.current_theme.dark else "tk-dark"
            self.palette = self._palette()
            self.repaint()

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands of Ctrl-P."""
        for number, page in enumerate(self.pages, start=1):
            yield SystemCommand(page.title, f"Page {number}", partial(self.action_page, number))
        for title, help_text, action in (
            ("Pause", "Pause or resume reading", self.action_pause),
            ("Longer interval", "Read less often", partial(self.action_interval, 1)),
            ("Shorter interval", "Read more often", partial(self.action_interval, -1)),
            ("Sort", "Sort by the next column", self.action_sort),
            ("Reverse", "Reverse the order", self.action_reverse),
            ("Filter", "Show only rows that contain ...", self.action_filter),
            ("End request", "End the request under the cursor", self.action_abort),
            ("All servers", "Show all servers together", self.action_leave),
            ("Theme", "Switch between light and dark", self.action_theme),
            ("Help", "Show the keys", self.action_help),
            ("Quit", "Quit tk top", self.exit),
        ):
            yield SystemCommand(title, help_text, action)
