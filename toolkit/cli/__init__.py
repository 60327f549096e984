"""The command line. Each subcommand is a module; what is heavy is imported when a command runs."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

COMMANDS = ("serve", "chat", "run", "bench", "top")


class Ordered(TyperGroup):
    """Lists the commands in the order of COMMANDS, whichever have subcommands."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]  # Typer's own Context
        return [name for name in COMMANDS if name in self.commands]


app = typer.Typer(
    name="tk",
    cls=Ordered,
    help="Serve language models from the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: it fits 80 columns, and brackets stay brackets
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from toolkit import __version__

        print(f"tk {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point of `tk`."""
    from importlib import import_module

    for name in COMMANDS:
        import_module(f"toolkit.cli.{name}")

    app()
