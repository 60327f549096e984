"""`tk doctor`: all checks, one line each, with what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from toolkit.doctor.finding import Finding
from toolkit.inventory.console import answer, talk, write
from toolkit.logs import harmless

COLORS = {"pass": "green", "warn": "yellow", "fail": "red"}


NAME = max(len(name) for name in ("completions", "open files", "variables"))
"""Columns of the longest check's name."""


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints each as it comes, or all as JSON; the exit code of the command: 1 when a check failed."""
    found = []
    for one in findings:
        found.append(one)
        if not as_json:
            _print(one)
    if as_json:
        answer([one.as_json() for one in found])
    else:
        counts = {status: sum(one.status == status for one in found) for status in COLORS}
        talk(f"{counts['pass']} passed, {counts['warn']} to look at, {counts['fail']} failed.")
    return int(any(one.status == "fail" for one in found))


def _print(one: Finding) -> None:
    from rich.markup import escape
    from rich.table import Table

    line = Table.grid(padding=(0, 2))
    line.add_column(no_wrap=True, width=4)
    line.add_column(no_wrap=True, width=NAME)
    line.add_column(overflow="fold")
    line.add_row(f"[{COLORS[one.status]}]{one.status}[/]", one.name, escape(harmless(one.text)))
    if one.fix:
        line.add_row("", "", f"[bold]fix:[/] {escape(one.fix)}")
    write(line)
    sys.stdout.flush()
