"""The command line. Each subcommand is a module; what is heavy is imported when a command runs."""

from __future__ import annotations

import sys
import time

BEGAN = time.perf_counter()
"""When the command began."""

SUBJECTS = {
    "Serve": ("serve", "chat", "run"),
    "Measure": ("bench", "top"),
    "Models": ("models", "pull", "show", "rm"),
    "This machine": ("config", "doctor", "collect-env", "man", "completion"),
}
"""The commands, as the help groups them."""
COMMANDS = tuple(name for names in SUBJECTS.values() for name in names)

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
        try:
            from toolkit.cli.root import run

            sys.exit(run())
        except KeyboardInterrupt:  # before a command has begun, or after it has ended
            sys.exit(130)
