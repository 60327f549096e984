"""What all pages have in common."""

from __future__ import annotations

from typing import Any, ClassVar

from toolkit.top.drawing.listing import Listing
from toolkit.top.drawing.paint import Block
from toolkit.top.state import State


class Page:
    """One of the five. `listing` is its table, if it has one; `keys` are those of this page alone."""

    title: ClassVar[str]
    keys: tuple[tuple[str, str], ...] = ()
    wants_requests: ClassVar[bool] = False
    shows_age: ClassVar[bool] = True
    """Whether what it shows grows old, so that it is dimmed when the servers do not answer."""
    listing: Listing[Any] | None = None

    def show(self, state: State) -> None:
        """Takes what there is now."""

    def turn(self, by: int) -> bool:
        """Shows the next of what it can show, or the one before; whether it can."""
        return False

    def draw(self, state: State, width: int, height: int) -> Block:
        """The page in `width` columns and at most `height` lines."""
        raise NotImplementedError
