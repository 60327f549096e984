"""What these commands write: the answer to stdout, whole lines of any length where nobody reads along; the talk to stderr."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from toolkit.logs import harmless

if TYPE_CHECKING:
    from rich.console import RenderableType

WIDE = 400
"""Columns of what goes into a pipe: nothing of it is cut."""


def write(*what: RenderableType) -> None:
    """Text and tables to stdout, in rich's markup. It leaves colors out for NO_COLOR, pipes and dumb terminals."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDE, emoji=False)
    with console.capture() as captured:
        for one in what:
            console.print(one)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n")


def answer(value: Any) -> None:
    """JSON, on stdout."""
    print(json.dumps(value, indent=2))


def talk(text: str) -> None:
    """A paragraph on stderr."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else WIDE
    print(
        textwrap.fill(harmless(text), width, break_long_words=False, break_on_hyphens=False),
        file=sys.stderr,
    )


def print_facts(title: str, facts: list[tuple[str, str]]) -> None:
    """A title, and below it what is known: a word, and a text that may have several lines."""
    from rich.markup import escape
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for word, text in facts:
        table.add_row(f"  {word}", escape(harmless(text)))
    write(f"[bold]{escape(harmless(title))}[/]", table)
