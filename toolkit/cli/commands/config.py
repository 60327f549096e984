"""`tk config`."""

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from toolkit.cli.command import given_settings
from toolkit.cli.help import HELP_FLAGS, Command, CommandGroup, settings_of
from toolkit.cli.root import app, tree
from toolkit.config.fields import Option
from toolkit.config.sources import SourcedValue, settings_file
from toolkit.errors import ConfigError, did_you_mean
from toolkit.logs import escape_json

DEFAULT = "default"

group = typer.Typer(cls=CommandGroup, rich_markup_mode=None)
app.add_typer(group, name="config")

Settings = list[tuple[Option, SourcedValue]]


@group.callback(invoke_without_command=True)
def config(ctx: typer.Context) -> None:
    """Show the settings and their origins."""
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(2)


@group.command(
    "show", cls=Command, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def show(
    ctx: typer.Context,
    command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Only this command, such as serve or 'bench offline'. Its flags may follow.",
        ),
    ] = None,
    origin: Annotated[
        bool,
        typer.Option(
            "--origin", help="Show the origin of each value: flag, variable, file or default."
        ),
    ] = False,
    file: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", help="Settings file to use instead of ./tk.toml."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with origins.")] = False,
) -> None:
    """Print the current value of every setting, in tk.toml format.

    Keys are masked. A setting that is not set is shown with its default, or as a comment if it has
    none."""
    commands = _commands()
    if command is not None:
        path = tuple(re.split(r"[ .]", command.strip()))
        if path not in commands:
            known = [" ".join(each) for each in commands]
            raise ConfigError(
                f"--command: {command!r} has no settings.{did_you_mean(command, known)}"
            )
        commands = {path: commands[path]}
    elif ctx.args:
        raise ConfigError(
            f"Unknown flag {ctx.args[0]} of 'tk config show'. Flags of a command follow --command."
        )
    flags: dict[str, Any] = {}
    if ctx.args:
        [(path, one)] = commands.items()
        # This context has no parent, so the help flags are not inherited.
        names = {"help_option_names": HELP_FLAGS}
        flags = one.make_context(" ".join(("tk", *path)), list(ctx.args), **names).params
    flags["config"] = file
    shown = {path: _settings(path, one, flags) for path, one in commands.items()}
    if as_json:
        print(
            json.dumps({" ".join(path): _as_json(rows) for path, rows in shown.items()}, indent=2)
        )
        return
    print(f"# {settings_file(file, os.environ) or 'no tk.toml'}")
    for path, rows in shown.items():
        print(f"\n[{'.'.join(path)}]", *_lines(rows, with_origin=origin), sep="\n")


def every_setting() -> dict[tuple[str, ...], Settings]:
    """Return the settings of all commands, with origins. Raises ConfigError if one is invalid."""
    return {path: _settings(path, one, {}) for path, one in _commands().items()}


def _commands() -> dict[tuple[str, ...], Any]:
    """Return the commands that have settings, by their words."""
    return {path: one for path, one in _walk(tree()) if settings_of(one)}


def _walk(command: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _walk(below, (*path, name))


def _settings(path: tuple[str, ...], command: Any, flags: dict[str, Any]) -> Settings:
    """Return all settings of a command, given these flags."""
    rows = list(settings_of(command).values())
    given = given_settings(rows, flags, path, tree())
    return [(row, given.get(row.name, SourcedValue(row.default, DEFAULT))) for row in rows]


def _as_json(rows: Settings) -> dict[str, Any]:
    def value(row: Option, one: SourcedValue) -> Any:
        shown = row.mask(one.value)
        return repr(shown) if isinstance(shown, float) and not math.isfinite(shown) else shown

    return {row.name: {"value": value(row, one), "origin": one.origin} for row, one in rows}


def _lines(rows: Settings, *, with_origin: bool) -> Iterable[str]:
    lines = [f"{row.name} = {_toml(row.mask(one.value))}" for row, one in rows]
    lines = [
        line if one.value is not None else f"# {row.name} ="
        for line, (row, one) in zip(lines, rows, strict=True)
    ]
    if not with_origin:
        return lines
    width = min(48, max(map(len, lines)))
    return [f"{line:<{width}}  # {one.origin}" for line, (_, one) in zip(lines, rows, strict=True)]


def _toml(value: Any) -> str:
    if isinstance(value, float):
        return repr(value)  # TOML writes inf and nan like Python
    return escape_json(json.dumps(value, ensure_ascii=False))
