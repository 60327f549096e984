"""Output of the inventory commands: results on stdout, notes on stderr. No wrapping for pipes."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from toolkit.logs import escape_controls

if TYPE_CHECKING:
    from rich.console import RenderableType

PIPE_COLUMNS = 400  # wide enough that nothing is cut


def print_rich(*items: RenderableType) -> None:
    """Print text and tables. No color with NO_COLOR, pipes or dumb terminals."""
    from toolkit.console import SafeConsole

    width = None if sys.stdout.isatty() else PIPE_COLUMNS
    console = SafeConsole(width=width)
    with console.capture() as captured:
        for item in items:
            console.print(item)
    print(*(line.rstrip() for line in captured.get().splitlines()), sep="\n")


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_lines(lines: list[str]) -> None:
    print(*map(escape_controls, lines), sep="\n")


def print_note(text: str) -> None:
    """Print a paragraph on stderr."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else PIPE_COLUMNS
    print(
        textwrap.fill(escape_controls(text), width, break_long_words=False, break_on_hyphens=False),
        file=sys.stderr,
    )


def print_facts(title: str, facts: list[tuple[str, str]]) -> None:
    """Print a title, and below it (label, text) rows. A text may have several lines."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in facts:
        table.add_row(f"  {label}", text)
    print_rich(Text(title, "bold"), table)
