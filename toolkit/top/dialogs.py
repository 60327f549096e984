"""Dialogs over a page: help, one request in detail, a question."""

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from toolkit.top.drawing.paint import Block, Line, wrap
from toolkit.top.drawing.widgets import Canvas
from toolkit.top.keys import HELP
from toolkit.top.pages.requests import RequestRow, RequestsPage, details


class Dialog(ModalScreen[bool]):
    """A dialog. Its result is True after Enter or y, False after Esc or n."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > Vertical {
        height: auto; border: round $primary; background: $surface; padding: 0 1;
        border-title-color: $primary; border-title-style: bold; border-subtitle-color: $text-muted;
    }
    Dialog Canvas { background: $surface; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n,q", "answer(False)", "Back"),
        Binding("enter,y", "answer(True)", "Yes"),
    ]

    def __init__(
        self, title: str, keys: str, width: int, height: int, draw: Callable[[int, int], Block]
    ) -> None:
        super().__init__()
        self.heading, self.hint = title, keys
        self.inner = (width, height)
        self.canvas = Canvas(draw)

    def compose(self) -> ComposeResult:
        with Vertical() as frame:
            width, height = self.inner
            frame.styles.width, frame.styles.max_width = width, "100%"
            frame.border_title, frame.border_subtitle = self.heading, self.hint
            self.canvas.styles.height = height
            yield self.canvas

    def action_answer(self, answer: bool) -> None:
        """Close the dialog."""
        self.dismiss(answer)


def help_dialog() -> Dialog:
    lines: Block = [[(f"{key:<12}", "key"), (does, "")] for key, does in HELP]
    return Dialog("Keys", "Esc: back", 62, len(lines), lambda *_: lines)


def question(title: str, text: str, keys: str) -> Dialog:
    def draw(width: int, height: int) -> Block:
        return [[(line, "")] for line in wrap(text, width, height)]

    return Dialog(title, keys, 60, 3, draw)


class RequestDialog(Dialog):
    """One live request, updated with each reading."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("x,delete", "app.abort", "End")]

    def __init__(self, page: RequestsPage, row: RequestRow) -> None:
        super().__init__("Request", "x: end it, Esc: back", 66, 16, self._lines)
        self.page, self.row = page, row
        self.has_ended = False
        self._last = (row.request.age, row.request.num_output_tokens)
        self._speeds: list[float] = []

    def _lines(self, width: int, height: int) -> Block:
        self._update()
        note: Line = (
            [("This request has ended. These are its last numbers.", "warn")]
            if self.has_ended
            else []
        )
        return [*details(self.row, self._speeds, width), note]

    def _update(self) -> None:
        """Take over the request's newest row."""
        found = self.page.find(self.row.name)
        self.has_ended = found is None
        if found is None:
            return
        self.row = found
        age, tokens = found.request.age, found.request.num_output_tokens
        age_before, tokens_before = self._last
        if age > age_before:
            speed = max(0, tokens - tokens_before) / (age - age_before)
            self._speeds = [*self._speeds, speed][-100:]
            self._last = (age, tokens)
