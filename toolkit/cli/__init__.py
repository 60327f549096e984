"""The command line. Each subcommand is a module; what is heavy is imported when a command runs."""

from __future__ import annotations

import os
import sys
import time

from toolkit.cli.names import VALUES

BEGAN = time.perf_counter()
"""When the command began."""


def _open_closed_streams() -> None:
    """Has standard streams that were closed lead to nowhere: their descriptors would be given to sockets, and what writes would fail."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(
                opened, opened == number
            )  # if it is not, something else has its number
            setattr(sys, name, open(opened, mode, encoding="utf-8"))  # noqa: SIM115  # for as long as this runs


def main() -> None:
    """The entry point of `tk`. What shells and scripts ask for often is answered before Typer is imported."""
    _open_closed_streams()
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from toolkit.version import __version__

        print(f"tk {__version__}")
    elif arguments[:1] == [VALUES]:
        from toolkit.cli.values import values

        print(*values(arguments[1], arguments[2:]), sep="\n")
    else:
        try:
            from toolkit.cli.root import run

            sys.exit(run())
        except KeyboardInterrupt:  # before a command has begun, or after it has ended
            sys.exit(130)
