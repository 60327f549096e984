"""What the palette of commands lists."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from textual.app import SystemCommand

if TYPE_CHECKING:
    from toolkit.top.app import TopApp


def commands(app: TopApp) -> Iterator[SystemCommand]:
    """Title, help and action of each."""
    for number, page in enumerate(app.pages, start=1):
        yield SystemCommand(page.title, f"Page {number}", partial(app.action_page, number))
    for title, does, action in (
        ("Pause", "Stop reading, or go on", app.action_pause),
        ("Look less often", "A longer interval", partial(app.action_interval, 1)),
        ("Look more often", "A shorter interval", partial(app.action_interval, -1)),
        ("Sort", "By the next column", app.action_sort),
        ("Reverse", "Sort the other way round", app.action_reverse),
        ("Filter", "Show only rows that contain ...", app.action_filter),
        ("End request", "The one under the cursor, after asking", app.action_abort),
        ("All servers", "Look at all servers together", app.action_leave),
        ("Theme", "Light or dark", app.action_theme),
        ("Help", "What the keys do", app.action_help),
        ("Quit", "Leave tk top", app.exit),
    ):
        yield SystemCommand(title, does, action)
