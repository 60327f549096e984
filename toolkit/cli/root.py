"""The tree of commands, and what becomes of mistakes in a command line."""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from toolkit.cli import COMMANDS
from toolkit.cli.help import HELP_FLAGS, Group
from toolkit.errors import ToolkitError

EXIT_CODES = {
    0: "Done.",
    1: "A fault of tk, with its traceback.",
    2: "A mistake that can be mended: a flag, a setting, a model, a server that is not there. The error says which.",
    130: "Ctrl-C.",
}
"""What every command ends with."""

app = typer.Typer(
    name="tk",
    cls=Group,
    help="Serve language models from the command line.",
    epilog="Exit codes: 0 done, 1 measured in vain or a fault of tk, 2 a mistake to mend, 130 Ctrl-C. Manual: tk man.",
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
        from toolkit import __version__

        print(f"tk {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)


def tree() -> Group:
    """Every command, as Typer's objects."""
    for name in COMMANDS:
        import_module(f"toolkit.cli.{name}")
    group = typer.main.get_command(app)
    assert isinstance(group, Group)
    group.commands = {name: group.commands[name] for name in COMMANDS}
    return group


def run() -> int:
    """Runs the command that was asked for; its exit code. A mistake in the command line is one paragraph on stderr."""
    try:
        return tree().main(prog_name="tk", standalone_mode=False) or 0
    except ToolkitError as error:
        print(f"tk: {error.message}", file=sys.stderr)
        return 2
    except typer.TyperException as error:
        print(f"tk: {error.format_message()}", file=sys.stderr)
        return error.exit_code
