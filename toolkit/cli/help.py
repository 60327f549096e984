"""Help on one screen: options by subject, only the common ones unless --help-all asks; and what was meant by a flag
or a command that does not exist.
"""

from __future__ import annotations

import inspect
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from toolkit.config.fields import Option
from toolkit.errors import ConfigError, did_you_mean

HELP_FLAGS = ["-h", "--help"]
ALL = "--help-all"
OTHER = "Options"
"""The heading of options that are no settings."""
WIDEST = 34
"""Columns that flags get before their text; the text of a wider one starts in the next line."""


def show_all(ctx: typer.Context, value: bool) -> None:
    """The callback of --help-all."""
    if value:
        ctx.meta[ALL] = True
        print(ctx.get_help())
        raise typer.Exit


def settings_of(command: Any) -> dict[str, Option]:
    """The settings among a command's options, by name."""
    return {row.name: row for row in getattr(inspect.unwrap(command.callback), "rows", ())}


class _Readable:
    """What commands and groups have in common. The overridden methods are Typer's."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes what follows the description."""
        rows = settings_of(self)
        if ctx.meta.get(ALL) or not any(row.common for row in rows.values()):
            self._write_all(ctx, formatter, rows)
        else:
            self._write_common(ctx, formatter, rows)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Writes the description, or where one screen must hold all, its first paragraph."""
        whole = ctx.command.help
        if not ctx.meta.get(ALL) and whole:
            ctx.command.help = inspect.cleandoc(whole).split("\n\n")[0]
        super().format_help_text(ctx, formatter)  # type: ignore[misc]  # of the class beside this one
        ctx.command.help = whole

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises ConfigError for a flag that does not exist, with the nearest ones."""
        try:
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]  # of the class beside this one
        except typer.TyperException as error:
            if not hasattr(error, "possibilities"):  # what only an unknown flag has
                raise
            flag = error.option_name  # type: ignore[attr-defined]  # Typer has no public name for this error
            known = [name for param in ctx.command.params for name in (*param.opts, *param.secondary_opts)]
            raise ConfigError(
                f"{flag} is no flag of '{ctx.command_path}'.{did_you_mean(flag, known)} "
                f"'{ctx.command_path} {ALL if ALL in known else '--help'}' lists them.",
                param=flag,
            ) from None
        return rest

    def _write_all(self, ctx: Any, formatter: Any, rows: dict[str, Option]) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in ctx.command.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(_subject(param, rows), []).append(record)
        sections[OTHER] = sections.pop(OTHER, [])  # last
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records, WIDEST)

    def _write_common(self, ctx: Any, formatter: Any, rows: dict[str, Option]) -> None:
        """One screen: no empty lines between subjects, and of each text only the first sentence."""
        sections: dict[str, list[tuple[str, str]]] = {}
        positional = {row.name for row in rows.values() if row.argument}
        for param in ctx.command.get_params(ctx):
            row = rows.get(param.name.removesuffix("_argument"))
            record = param.get_help_record(ctx)
            is_second_way = param.name in positional  # --model, beside MODEL
            if row is None or not row.common or is_second_way or record is None:
                continue
            is_argument = param.param_type_name == "argument"
            flag = str(row.metavar) if is_argument else row.flag if row.type is bool else record[0]
            sections.setdefault(_subject(param, rows), []).append((flag, row.summary + row.shown_default))
        flags = [flag for records in sections.values() for flag, _ in records]
        width = max(len(flag) for flag in flags if len(flag) <= WIDEST)
        formatter.write_paragraph()
        for title, records in sections.items():
            formatter.write_heading(title)
            with formatter.indentation():
                formatter.write_dl([(flag.ljust(width), text) for flag, text in records], width)
        formatter.write(f"All {len(rows)} settings: {ctx.command_path} {ALL}\n")


class Command(_Readable, TyperCommand):
    """A command whose help fits one screen."""


class Group(_Readable, TyperGroup):
    """A command with others below it, or the program itself."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes what follows the description."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises ConfigError for a command that does not exist, with the nearest ones."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            listed = ", ".join(self.commands)
            hint = did_you_mean(name, self.commands) or f" There are: {listed}."
            raise ConfigError(f"{name!r} is no command of '{ctx.command_path}'.{hint}", param=name)
        return super().resolve_command(ctx, args)


def _subject(param: Any, rows: dict[str, Option]) -> str:
    """The heading that an option or an argument stands under."""
    if param.param_type_name == "argument":
        return "Arguments"
    row = rows.get(param.name)
    return OTHER if row is None or row.subject is None else row.subject
