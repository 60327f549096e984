"""Textual widget that shows drawn lines."""

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol, cast

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.strip import Strip
from textual.widget import Widget

from toolkit.logs import escape_line
from toolkit.top.drawing.paint import Block, Line, fit
from toolkit.top.drawing.palette import Palette


class HasPalette(Protocol):
    """The app, as this module uses it."""

    palette: Palette


class Canvas(Widget):
    """Shows the lines of `draw(width, height)`; `redraw` and a new size draw them again."""

    DEFAULT_CSS = "Canvas { height: 1fr; }"
    ALLOW_SELECT = False

    def __init__(
        self,
        draw: Callable[[int, int], Block],
        *,
        id: str | None = None,
        on_position: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(id=id)
        self._draw = draw
        self._on_position = on_position
        self._drawn: Block = []
        self._drawn_size: tuple[int, int] | None = None
        self._style: Callable[[str], Style] = Style.parse

    def redraw(self) -> None:
        """Draw again with the next refresh."""
        self._drawn_size = None
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width, height = self.content_size
        if self._drawn_size != (width, height):
            lines = self._draw(width, height)
            self._drawn = [[(escape_line(text), style) for text, style in line] for line in lines]
            self._drawn_size = (width, height)
            self._style = self._styles()
        line: Line = self._drawn[y] if y < len(self._drawn) else []
        return Strip(
            [Segment(text, self._style(name)) for text, name in fit(line, width) if text], width
        )

    def _styles(self) -> Callable[[str], Style]:
        """Return a function from style name to style, on top of the widget's own style."""
        palette = cast(HasPalette, self.app).palette
        base = self.rich_style if palette.has_colors else Style.null()
        return lru_cache(maxsize=1024)(lambda name: base + palette.style(name))

    def on_click(self, event: events.Click) -> None:
        """Report the column and line of a click."""
        if self._on_position is not None:
            self._on_position(event.x, event.y)
