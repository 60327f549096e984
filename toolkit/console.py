"""The rich console of all commands. It shows text from servers and files as it is written."""

import io
import locale
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from toolkit.errors import ConfigError
from toolkit.logs import escape_controls


def read_piped() -> str | None:
    """Return the text piped to standard input, None if that is a terminal.

    It is UTF-8 or in the locale's encoding. Raises ConfigError if it is neither."""
    if sys.stdin is None or sys.stdin.isatty():
        return None
    data = sys.stdin.buffer.read()
    for encoding in ("utf-8", locale.getencoding()):
        with suppress(UnicodeDecodeError):
            return io.TextIOWrapper(io.BytesIO(data), encoding).read()
    raise ConfigError("Standard input is not UTF-8 text.")


def as_text(argument: str) -> str:
    """Return an argument of the command line as text, with `?` for bytes that are none.

    Python decodes it by the locale, which may be ASCII where the terminal has UTF-8."""
    try:
        argument.encode()
    except UnicodeEncodeError:  # bytes that could not be decoded have become lone surrogates
        with suppress(UnicodeDecodeError):
            return os.fsencode(argument).decode()
        return argument.encode(errors="replace").decode()
    return argument


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
