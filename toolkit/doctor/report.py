"""`tk doctor`: print all findings, one line each, with fixes."""

import sys
from collections.abc import Iterable

from toolkit.doctor.finding import Finding
from toolkit.inventory.console import print_json, print_note, print_rich

COLORS = {"pass": "green", "warn": "yellow", "fail": "red"}
NAME_COLUMNS = len("completions")  # the longest name of a check


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print each finding as it comes, or all as JSON. Return the exit code: 1 if a check failed."""
    found = []
    for one in findings:
        found.append(one)
        if not as_json:
            _print(one)
    if as_json:
        print_json([one.as_json() for one in found])
    else:
        counts = {status: sum(one.status == status for one in found) for status in COLORS}
        print_note(f"{counts['pass']} passed, {counts['warn']} warnings, {counts['fail']} failed.")
    return int(any(one.status == "fail" for one in found))


def _print(one: Finding) -> None:
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2))
    line.add_column(no_wrap=True, width=4)
    line.add_column(no_wrap=True, width=NAME_COLUMNS)
    line.add_column(overflow="fold")
    line.add_row(Text(one.status, COLORS[one.status]), one.name, one.text)
    if one.fix:
        line.add_row("", "", Text.assemble(("fix:", "bold"), " ", one.fix))
    print_rich(line)
    sys.stdout.flush()
