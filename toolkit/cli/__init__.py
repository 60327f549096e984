"""The command line. Each subcommand is a module; what is heavy is imported when a command runs."""

from __future__ import annotations

import sys

COMMANDS = ("serve", "chat", "run", "bench", "top", "man", "completion")

VALUES = "__values"
"""The command that completion scripts call for values that only the machine or a server knows."""


def main() -> None:
    """The entry point of `tk`. What shells and scripts ask for often is answered before Typer is imported."""
    arguments = sys.argv[1:]
    if arguments == ["--version"]:
        from toolkit import __version__

        print(f"tk {__version__}")
    elif arguments[:1] == [VALUES]:
        from toolkit.cli.values import values

        print(*values(arguments[1], arguments[2:]), sep="\n")
    else:
        from toolkit.cli.root import run

        sys.exit(run())
