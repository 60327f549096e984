"""The command line. Heavy imports happen when a command runs."""

import os
import sys
import time
from collections.abc import Sequence
from io import TextIOWrapper

from toolkit.cli.names import VALUES

START = time.perf_counter()  # of the command


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams.

    Otherwise sockets would get their descriptors, and writes to them would fail."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            # If the numbers differ, another file has the stream's number.
            os.set_inheritable(opened, opened == number)
            stream = open(opened, mode, encoding="utf-8")  # noqa: SIM115  # until the process ends
            setattr(sys, name, stream)


def _replace_unprintable() -> None:
    """Print `?` for characters that the locale's encoding lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _announce_server(arguments: Sequence[str]) -> None:
    """Print a first line of `tk serve` at a terminal: imports take a second, until it has read
    its settings."""
    is_json = os.environ.get("TK_LOG_FORMAT") == "json" or "json" in arguments
    is_report = not {"-h", "--help", "--help-all", "--dry-run"}.isdisjoint(arguments)
    if arguments[:1] == ["serve"] and sys.stderr.isatty() and not (is_json or is_report):
        from toolkit.version import __version__

        print(f"tk {__version__} is starting ...", file=sys.stderr, flush=True)


def main() -> None:
    """Entry point of `tk`. The version and completion values do not need to import Typer."""
    _open_closed_streams()
    _replace_unprintable()
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["version"]):
        from toolkit.version import __version__

        print(f"tk {__version__}")
    elif arguments[:1] == [VALUES]:
        from toolkit.cli.values import values

        print(*values(arguments[1], arguments[2:]), sep="\n")
    else:
        _announce_server(arguments)
        try:
            from toolkit.cli.root import run

            sys.exit(run())
        except KeyboardInterrupt:  # before or after the command
            sys.exit(130)
