"""Help on one screen: common options by subject, all of them with --help-all.

Unknown flags and commands are errors that suggest the nearest names."""

import inspect
import logging
import re
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from toolkit.cli.names import ALIASES, SUBJECTS
from toolkit.cli.vllm import translate
from toolkit.config.fields import Option
from toolkit.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)

HELP_FLAGS = ["-h", "--help"]
ALL = "--help-all"
OTHER = "Options"  # heading of options that are not settings
MAX_FLAG_COLUMNS = 34  # the text of a wider flag starts on the next line


def show_all(ctx: typer.Context, value: bool) -> None:
    """Callback of --help-all."""
    if value:
        ctx.meta[ALL] = True
        print(ctx.get_help())
        raise typer.Exit


def settings_of(command: Any) -> dict[str, Option]:
    """Return the settings among a command's options, by name."""
    return {row.name: row for row in getattr(inspect.unwrap(command.callback), "rows", ())}


def known_settings(root: Any) -> dict[tuple[str, ...], list[str]]:
    """Return the settings' names of each command that has settings, by the command's words."""

    def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
        yield path, list(settings_of(command))
        for name, below in getattr(command, "commands", {}).items():
            yield from walk(below, (*path, name))

    return {path: names for path, names in walk(root, ()) if names}


def path_of(ctx: Any) -> tuple[str, ...]:
    """Return the words of a context's command, without the program's name."""
    return () if ctx.parent is None else (*path_of(ctx.parent), ctx.info_name)


def repeat_flags(args: list[str], rows: dict[str, Option]) -> list[str]:
    """Repeat a flag before each of its values, so that it accepts several words as in vLLM.

    `--goodput ttft:200 tpot:50` becomes `--goodput ttft:200 --goodput tpot:50`. A word is a value
    if it has the sign (`:` or `=`) of the flag's metavar, or is a JSON object. If the sign is
    `...`, every word is one, but only after the command's argument, which would be taken for a
    value."""
    signs = {
        row.flag: sign
        for row in rows.values()
        for sign in ("...", ":", "=")
        if row.type is tuple and sign in (row.metavar or "")
    }
    with_value = {"--config"}.union(
        *((row.flag, *row.aliases) for row in rows.values() if row.type is not bool)
    )
    arguments = {row.flag for row in rows.values() if row.argument}
    has_argument = any(word.partition("=")[0] in arguments for word in args)
    repeated: list[str] = []
    flag = previous = ""  # `flag`: takes this word, too
    for word in args:
        is_first_value = previous in with_value
        sign = signs.get(flag, "")
        if word.startswith("-") and not is_first_value:
            flag = word if word in signs else ""
        elif (
            not is_first_value
            and flag
            and (has_argument if sign == "..." else sign in word or word.startswith("{"))
        ):
            repeated.append(flag)
        elif not is_first_value:
            flag, has_argument = "", True
        repeated.append(word)
        previous = word
    return repeated


class _HelpMixin:
    """Common part of commands and groups. It overrides methods of Typer."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help after the description."""
        rows = settings_of(self)
        if ctx.meta.get(ALL) or not any(row.common for row in rows.values()):
            self._write_all(ctx, formatter, rows)
        else:
            self._write_common(ctx, formatter, rows)

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the description; in the short help only its first paragraph."""
        text = ctx.command.help
        if not ctx.meta.get(ALL) and text:
            ctx.command.help = inspect.cleandoc(text).split("\n\n")[0]
        super().format_help_text(ctx, formatter)  # type: ignore[misc]  # Typer's
        ctx.command.help = text

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raise ConfigError for an unknown flag, with the nearest flags."""
        try:
            command = " ".join(ctx.command_path.split()[1:])
            is_group = hasattr(self, "commands")
            args, notes = translate(args, settings_of(self), command, is_group=is_group)
            for note in notes:
                logger.warning("%s", note)
            args = repeat_flags(args, settings_of(self))
            rest: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]  # Typer's
        except typer.TyperException as error:
            if not hasattr(error, "possibilities"):  # only an unknown flag has them
                raise
            flag = error.option_name  # type: ignore[attr-defined]  # not exported
            known = [
                name
                for param in ctx.command.params
                for name in (*param.opts, *param.secondary_opts)
            ]
            raise ConfigError(
                f"Unknown flag {flag} of '{ctx.command_path}'.{did_you_mean(flag, known)} "
                f"'{ctx.command_path} {ALL if ALL in known else '--help'}' lists the flags.",
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
                formatter.write_dl(records, MAX_FLAG_COLUMNS)

    def _write_common(self, ctx: Any, formatter: Any, rows: dict[str, Option]) -> None:
        """Write one screen: first sentences only, without empty lines between subjects."""
        sections: dict[str, list[tuple[str, str]]] = {}
        positional = {row.name for row in rows.values() if row.argument}
        for param in ctx.command.get_params(ctx):
            row = rows.get(param.name.removesuffix("_argument"))
            record = param.get_help_record(ctx)
            is_duplicate = param.name in positional  # --model, listed as MODEL
            if row is None or not row.common or is_duplicate or record is None:
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
                (flag, row.summary + row.default_suffix)
            )
        flags = [flag for records in sections.values() for flag, _ in records]
        width = max(len(flag) for flag in flags if len(flag) <= MAX_FLAG_COLUMNS)
        formatter.write_paragraph()
        for title, records in sections.items():
            formatter.write_heading(title)
            with formatter.indentation():
                formatter.write_dl([(flag.ljust(width), text) for flag, text in records], width)
        formatter.write(f"All {len(rows)} settings: {ctx.command_path} {ALL}\n")


class Command(_HelpMixin, TyperCommand):
    """A command whose help fits one screen."""


class CommandGroup(_HelpMixin, TyperGroup):
    """A command with subcommands, or the program itself."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the help after the description."""
        super().format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raise ConfigError for an unknown command, with the nearest commands."""
        name = args[0]
        if name not in self.commands and not name.startswith("-"):
            listed = ", ".join(self.commands)
            hint = did_you_mean(name, self.commands) or f" Commands: {listed}."
            raise ConfigError(
                f"Unknown command {name!r} of '{ctx.command_path}'.{hint}", param=name
            )
        return super().resolve_command(ctx, args)


class RootGroup(CommandGroup):
    """The program `tk`. Its help lists the commands by subject, on one screen."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Replace an alias: `tk help bench` is `tk bench --help`."""
        match args:
            case ["help", *path]:
                args = [*path, "--help"]
            case [word, *rest] if word in ALIASES:
                args = [ALIASES[word], *rest]
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the complete help."""
        formatter.write(f"Usage: {ctx.command_path} COMMAND [OPTIONS]    {self.help}\n")
        width, column = (max(map(len, names)) + 1 for names in (self.commands, SUBJECTS))
        for subject, names in SUBJECTS.items():
            for name in names:
                title = subject if name == names[0] else ""
                summary = summary_of(self.commands[name])
                formatter.write(f"{title:{column}} {name:{width}} {summary}\n")
        formatter.write(f"\n{self.epilog}\n")


def summary_of(command: Any) -> str:
    """Return the first sentence of a command's help, without the period."""
    first = " ".join(inspect.cleandoc(command.help or "").split("\n\n")[0].split())
    return re.split(r"[.:;] |[.]$", first)[0]


def _subject(param: Any, rows: dict[str, Option]) -> str:
    """Return the heading of an option or argument."""
    if param.param_type_name == "argument":
        return "Arguments"
    row = rows.get(param.name)
    return OTHER if row is None or row.subject is None else row.subject
