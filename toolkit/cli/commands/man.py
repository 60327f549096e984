"""`tk man`."""

import os
import shutil
import signal
import sys
from typing import Annotated

import typer

from toolkit.cli.help import Command
from toolkit.cli.root import app
from toolkit.doctor.shipped import shipped
from toolkit.errors import ConfigError, did_you_mean

OTHERS = {"tk.toml": "5", "tk-metrics": "7"}  # sections of pages that describe no command


@app.command("man", cls=Command)
def man(
    page: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="COMMAND", help="A command, such as bench offline; or tk.toml or metrics."
        ),
    ] = None,
) -> None:
    """Show the manual page of tk or of a command.

    tk man tk.toml describes the settings file, tk man metrics the Prometheus metrics of a server.
    """
    path = shipped("man", page_name(page or []))
    reader = shutil.which("man")
    sys.stdout.flush()
    if reader is not None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # ignored, it makes man's filters complain
        os.execv(reader, [reader, str(path)])
    from toolkit.cli.roff import as_text

    text = as_text(path.read_text())
    if sys.stdout.isatty():
        from pydoc import pager

        pager(text)
    else:
        print(text, end="")


def page_name(words: list[str]) -> str:
    """Return the file name of a page. Raises ConfigError if there is none."""
    from toolkit.cli.root import tree

    known = {"tk": "tk.1"} | {
        "-".join(("tk", *path)): f"{'-'.join(('tk', *path))}.1" for path in _paths(tree())
    }
    known |= {name: f"{name}.{section}" for name, section in OTHERS.items()}
    name = "-".join(words).removeprefix("tk-") or "tk"
    for candidate in (name, f"tk-{name}"):
        if candidate in known:
            return known[candidate]
    raise ConfigError(f"There is no manual page {name!r}.{did_you_mean(f'tk-{name}', known)}")


def _paths(group: object) -> list[tuple[str, ...]]:
    """Return the words of every command below a group."""
    commands: dict[str, object] = getattr(group, "commands", {})
    return [
        path
        for name, command in commands.items()
        for path in [(name,), *((name, *rest) for rest in _paths(command))]
    ]
