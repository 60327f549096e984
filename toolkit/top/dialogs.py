"""What opens over a page: help, one request in full, a question."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from toolkit.top.drawing.paint import Block, Line, wrap
from toolkit.top.drawing.widgets import Painted
from toolkit.top.keys import HELP
from toolkit.top.pages.requests import RequestsPage, Row, details


class Dialog(ModalScreen[bool]):
    """A frame over the screen. It ends with True for Enter or y, False for Esc or n."""

    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > Vertical { height: auto; border: round $primary; background: $surface; padding: 0 1;
                        border-title-color: $primary; border-title-style: bold; border-subtitle-color: $text-muted; }
    Dialog Painted { background: $surface; }
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
        self.painted = Painted(draw)

    def compose(self) -> ComposeResult:
        """See Screen."""
        with Vertical() as frame:
            width, height = self.inner
            frame.styles.width, frame.styles.max_width = width, "100%"
            frame.border_title, frame.border_subtitle = self.heading, self.hint
            self.painted.styles.height = height
            yield self.painted

    def action_answer(self, answer: bool) -> None:
        """Closes it."""
        self.dismiss(answer)


def help_dialog() -> Dialog:
    """What the keys do."""
    lines: Block = [[(f"{key:<12}", "key"), (does, "")] for key, does in HELP]
    return Dialog("Keys", "Esc goes back", 62, len(lines), lambda *_: lines)


def question(title: str, text: str, keys: str) -> Dialog:
    """Something to be confirmed."""

    def draw(width: int, height: int) -> Block:
        return [[(line, "")] for line in wrap(text, width, height)]

    return Dialog(title, keys, 60, 3, draw)


class RequestDialog(Dialog):
    """One request as it goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("x,delete", "app.abort", "End")]

    def __init__(self, page: RequestsPage, row: Row) -> None:
        super().__init__("Request", "x ends it, Esc goes back", 66, 16, self._lines)
        self.page, self.row = page, row
        self.is_over = False
        self._seen = (row.request.age, row.request.num_output_tokens)
        self._speeds: list[float] = []

    def _lines(self, width: int, height: int) -> Block:
        self._follow()
        over: Line = (
            [("This request has ended; so it was last seen.", "warn")] if self.is_over else []
        )
        return [*details(self.row, self._speeds, width), over]

    def _follow(self) -> None:
        """Takes what the page knows of it now."""
        found = self.page.find(self.row.name)
        self.is_over = found is None
        if found is None:
            return
        self.row = found
        age, tokens = found.request.age, found.request.num_output_tokens
        age_before, tokens_before = self._seen
        if age > age_before:
            self._speeds = [*self._speeds, max(0, tokens - tokens_before) / (age - age_before)][
                -100:
            ]
            self._seen = (age, tokens)
