"""The tree of commands, and what becomes of mistakes in a command line."""

from __future__ import annotations

import errno
import shutil
import sys
import textwrap
import traceback
from functools import cache
from importlib import import_module

import typer

from toolkit.cli.help import HELP_FLAGS, Group, Program
from toolkit.cli.names import COMMANDS
from toolkit.errors import ToolkitError
from toolkit.logs import harmless, keep_traceback, shows_tracebacks

EXIT_CODES = {
    0: "Done.",
    1: "A fault of tk. The error says where its traceback is.",
    2: "A mistake that can be mended: a flag, a setting, a model, a server that is not there. The error says which.",
    130: "Ctrl-C.",
}
"""What every command ends with."""

app = typer.Typer(
    name="tk",
    cls=Program,
    help="Serve language models from the command line.",
    epilog="tk COMMAND --help has its flags, tk man COMMAND its manual. tk --version.\n"
    "Exit codes: 0 done, 1 in vain or a fault of tk, 2 a mistake to mend, 130 Ctrl-C.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it fits 80 columns, and brackets stay brackets
    context_settings={"help_option_names": HELP_FLAGS},
)


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:  # with other flags; alone, `main` has answered it
        from toolkit.version import __version__

        print(f"tk {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@cache
def tree() -> Group:
    """Every command, as Typer's objects."""
    for name in COMMANDS:
        import_module(f"toolkit.cli.{name.replace('-', '_')}")
    group = typer.main.get_command(app)
    assert isinstance(group, Group)
    group.commands = {name: group.commands[name] for name in COMMANDS}
    return group


def run() -> int:
    """Runs the command that was asked for; its exit code. Whatever goes wrong is one paragraph on stderr."""
    try:
        return tree().main(prog_name="tk", standalone_mode=False) or 0
    except Exception as error:
        if shows_tracebacks():
            traceback.print_exc()
        return explain(error)


def explain(error: Exception) -> int:
    """Says on stderr what went wrong; the exit code for it."""
    if isinstance(error, ToolkitError):
        return _tell(error.message, 2)
    if isinstance(error, typer.TyperException):
        return _tell(error.format_message(), error.exit_code)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _tell(
            f"{error.filename or 'What the output goes to, or a file,'} cannot be written: {error.strerror}.",
            2,
        )
    said = " ".join(str(error).split())[:300]
    return _tell(
        f"this is a fault of tk, not of yours: {type(error).__name__}{f': {said}' if said else ''}. "
        f"{keep_traceback(error)} A report of it is welcome; 'tk collect-env' writes what it needs beside.",
        1,
    )


def _tell(message: str, code: int) -> int:
    """One line, or on a terminal one paragraph with its words whole; returns the code."""
    text = harmless(f"tk: {message}")
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        lines = (
            textwrap.fill(line, width, break_long_words=False, break_on_hyphens=False)
            for line in text.split("\n")
        )
        text = "\n".join(lines)
    print(text, file=sys.stderr)
    return code
