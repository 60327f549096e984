"""Base class of the pages."""

from typing import Any, ClassVar

from toolkit.top.drawing.listing import Listing
from toolkit.top.drawing.paint import Block
from toolkit.top.state import State


class Page:
    """One of the five pages. `listing` is its table, if any; `keys` are those of this page only."""

    title: ClassVar[str]
    keys: tuple[tuple[str, str], ...] = ()
    needs_requests: ClassVar[bool] = False
    is_time_dependent: ClassVar[bool] = True
    """True if its numbers age: they are dimmed while no server answers."""
    listing: Listing[Any] | None = None

    def show(self, state: State) -> None:
        """Take over the current state."""

    def turn(self, by: int) -> bool:
        """Show the next or previous part of the page; return False if it has only one."""
        return False

    def draw(self, state: State, width: int, height: int) -> Block:
        """Draw the page in `width` columns and at most `height` lines."""
        raise NotImplementedError
