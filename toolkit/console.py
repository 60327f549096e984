"""The rich console of all commands. It shows text from servers and files as it is written."""

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from toolkit.errors import ConfigError
from toolkit.logs import escape_controls


def read_piped() -> str | None:
    """Return the text piped to standard input, None if that is a terminal.

    Raises ConfigError if it is not text."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    try:
        piped = sys.stdin.read()
        piped.encode()  # other bytes may have become surrogates
    except UnicodeError:
        raise ConfigError("Standard input is not UTF-8 text.") from None
    return piped


class SafeConsole(Console):
    """Prints strings without markup, and control characters as escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        if isinstance(renderable, str):
            renderable = escape_controls(renderable)
        elif isinstance(renderable, Text):  # before its lines are wrapped
            renderable = renderable.copy()
            renderable.plain = escape_controls(renderable.plain)
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(escape_controls(text), style)
