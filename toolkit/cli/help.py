"""Help on one screen: options by subject, only the common ones unless --help-all asks; and what was meant by a flag
or a command that does not exist.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from toolkit.cli.names import SUBJECTS
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


def known_settings(root: Any) -> dict[tuple[str, ...], list[str]]:
    """The names of each command's settings, by the words of the command; those without settings are left out."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        yield path, list(settings_of(command))
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, (*path, name))

    return {path: names for path, names in walk(root, ()) if names}


def path_of(ctx: Any) -> tuple[str, ...]:
    """The words of the command that a context belongs to, without the program's name."""
    return () if ctx.parent is None else (*path_of(ctx.parent), ctx.info_name)


def spread(args: list[str], rows: dict[str, Option]) -> list[str]:
    """The words of a line, with a flag before each value of those that take several words of a kind, as in vLLM:
    `--goodput ttft:200 tpot:50`. Its kind is the sign in the flag's metavar.
    """
    signs = {
        row.flag: "=" if "=" in (row.metavar or "") else ":"
        for row in rows.values()
        if _takes_words(row)
    }
    spread_out: list[str] = []
    flag = None
    for index, word in enumerate(args):
        follows = flag is not None and args[index - 1] != flag
        if flag is not None and (word.startswith("-") or signs[flag] not in word):
            flag = None
        if flag is not None and follows:
            spread_out.append(flag)
        spread_out.append(word)
        flag = word if word in signs else flag
    return spread_out


def _takes_words(row: Option) -> bool:
    return (
        row.type is tuple and row.metavar is not None and ("=" in row.metavar or ":" in row.metavar)
    )


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
            rest: list[str] = super().parse_args(ctx, spread(args, settings_of(self)))  # type: ignore[misc]  # of the class beside this one
        except typer.TyperException as error:
            if not hasattr(error, "possibilities"):  # what only an unknown flag has
                raise
            flag = error.option_name  # type: ignore[attr-defined]  # Typer has no public name for this error
            known = [
                name
                for param in ctx.command.params
                for name in (*param.opts, *param.secondary_opts)
            ]
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
            flag = (
                str(row.metavar)
                if is_argument
                else ", ".join([row.flag, *row.aliases])
                if row.type is bool
                else record[0]
            )
            sections.setdefault(_subject(param, rows), []).append(
                (flag, row.summary + row.shown_default)
            )
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


class Program(Group):
    """The program itself: its commands by subject, on one screen."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Writes all of it."""
        formatter.write(f"Usage: {ctx.command_path} COMMAND [OPTIONS]    {self.help}\n\n")
        width = max(len(name) for name in self.commands)
        for subject, names in SUBJECTS.items():
            formatter.write_heading(subject)
            with formatter.indentation():
                rows = [(name.ljust(width), summary_of(self.commands[name])) for name in names]
                formatter.write_dl(rows, width)
        formatter.write(f"\n{self.epilog}\n")


def summary_of(command: Any) -> str:
    """What a command does, in so few words that they fit a line beside its name."""
    first = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return re.split(r"[.:;] |[.]$", first)[0]


def _subject(param: Any, rows: dict[str, Option]) -> str:
    """The heading that an option or an argument stands under."""
    if param.param_type_name == "argument":
        return "Arguments"
    row = rows.get(param.name)
    return OTHER if row is None or row.subject is None else row.subject
