"""`tk ps`."""

import time
from collections.abc import Sequence
from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.inventory.console import print_json, print_note, print_rich
from toolkit.running import RunningServer, running_servers


@app.command("ps", cls=Command)
def ps(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List your running servers.

    Those that tk serve and tk chat started on this machine. STATE: starting while the model loads,
    ready, or stopping while requests finish. ENDS: the time without a request after which a server
    ends by itself."""
    import msgspec

    servers = running_servers()
    if json:
        print_json([msgspec.to_builtins(one) for one in servers])
    elif not servers:
        print_note("No server of yours runs on this machine. 'tk serve MODEL' starts one.")
    else:
        _print_table(servers)


def _print_table(servers: Sequence[RunningServer]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("MODEL", "ADDRESS", "STATE", "UP", "PROCESS", "KEY", "ENDS"):
        right = title in ("UP", "PROCESS")
        table.add_column(title, justify="right" if right else "left", no_wrap=True)
    for one in servers:
        table.add_row(
            ", ".join(one.names),
            one.address,
            one.state,
            _duration(time.time() - one.since),
            str(one.pid),
            "needed" if one.needs_key else "none",
            "never" if one.idle_timeout is None else f"idle {_duration(one.idle_timeout)}",
        )
    print_rich(table)


def _duration(seconds: float) -> str:
    """Return the largest unit of a duration, such as 5 s, 12 min, 3 h or 2 days."""
    for unit, length, limit in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{max(0, int(seconds)) // length} {unit}"
    return f"{int(seconds) // 86_400} days"
