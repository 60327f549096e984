"""Where the drawn lines meet Textual."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, cast

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from toolkit.top.drawing.paint import Block, Line, fit
from toolkit.top.drawing.palette import Palette


class Painter(Protocol):
    """The app, as far as widgets need it."""

    palette: Palette


class Painted(Widget):
    """Shows what `draw(width, height)` gives. It is drawn anew when `repaint` says so, and when the size changes."""

    DEFAULT_CSS = "Painted { height: 1fr; }"
    ALLOW_SELECT = False

    def __init__(
        self,
        draw: Callable[[int, int], Block],
        *,
        id: str | None = None,
        clicked: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._clicked = clicked
        self._drawn: Block = []
        self._drawn_size: tuple[int, int] | None = None
        self._style: Callable[[str], Style] = Style.parse

    def repaint(self) -> None:
        """What it shows is no longer true."""
        self._drawn_size = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """See Widget."""
        width, height = self.content_size
        if self._drawn_size != (width, height):
            self._drawn = self._draw(width, height)
            self._drawn_size = (width, height)
            self._style = self._styles()
        line: Line = self._drawn[y] if y < len(self._drawn) else []
        return Strip(
            [Segment(text, self._style(name)) for text, name in fit(line, width) if text], width
        )

    def _styles(self) -> Callable[[str], Style]:
        """Styles by name, upon the widget's own."""
        palette = cast(Painter, self.app).palette
        base = self.rich_style if palette.has_colors else Style.null()
        return lru_cache(maxsize=1024)(lambda name: base + palette.style(name))

    def on_click(self, event: events.Click) -> None:
        """Says where."""
        if self._clicked is not None:
            self._clicked(event.x, event.y)
