"""The tree of commands, read from Typer's objects so that no flag is missed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from toolkit.cli.help import OTHER, settings_of
from toolkit.cli.root import tree
from toolkit.cli.vllm import rules_of
from toolkit.config.fields import Option
from toolkit.config.vllm import Use


@dataclass(frozen=True, slots=True)
class Flag:
    """An option of a command."""

    names: tuple[str, ...]
    negations: tuple[str, ...]  # names that turn it off
    value: str  # placeholder of its value; empty for a switch
    help: str
    choices: tuple[str, ...]
    repeatable: bool
    subject: str
    row: Option | None  # the setting, if it is one


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument."""

    value: str
    help: str
    choices: tuple[str, ...]
    required: bool
    repeatable: bool


@dataclass(frozen=True, slots=True)
class CommandNode:
    """A command and its subcommands."""

    path: tuple[str, ...]
    help: str
    flags: tuple[Flag, ...]
    honoured: tuple[Flag, ...]  # flags of vLLM that have another name here
    arguments: tuple[Argument, ...]
    commands: tuple[CommandNode, ...]

    @property
    def name(self) -> str:
        """Command line: 'tk bench offline'."""
        return " ".join(self.path)

    @property
    def page(self) -> str:
        """Name of the man page: 'tk-bench-offline'."""
        return "-".join(self.path)

    @property
    def summary(self) -> str:
        """First sentence of the help, on one line, without a full stop."""
        return self.help.split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")

    @property
    def rows(self) -> list[Option]:
        """Settings among the flags."""
        return [flag.row for flag in self.flags if flag.row is not None]

    def walk(self) -> Iterator[CommandNode]:
        """Yield this command and all below it."""
        yield self
        for command in self.commands:
            yield from command.walk()


def program() -> CommandNode:
    """Return `tk` with all its subcommands."""
    return _command(tree(), ("tk",), None)


def _command(command: Any, path: tuple[str, ...], parent: Any) -> CommandNode:
    context = command.make_context(path[-1], [], parent=parent, resilient_parsing=True)
    rows = settings_of(command)
    params = command.get_params(context)
    subcommands = getattr(command, "commands", {})
    flags = tuple(_flag(p, rows, context) for p in params if p.param_type_name == "option")
    return CommandNode(
        path=path,
        help=inspect.cleandoc(command.help or ""),
        flags=flags,
        honoured=tuple(_honoured(" ".join(path[1:]), flags)),
        arguments=tuple(_argument(p, rows) for p in params if p.param_type_name == "argument"),
        commands=tuple(_command(one, (*path, name), context) for name, one in subcommands.items()),
    )


def _flag(param: Any, rows: dict[str, Option], context: Any) -> Flag:
    row = rows.get(param.name)
    choices = _choices(param, row)
    value = "" if param.is_flag else (param.metavar or param.display_type(context)).strip("<>")
    if choices or value == "str":
        value = "VALUE" if choices else "TEXT"
    return Flag(
        names=tuple(sorted(param.opts, key=lambda name: name.startswith("--"))),
        negations=tuple(param.secondary_opts),
        value={"int": "N", "float": "X"}.get(value, value),
        help=row.help if row is not None else param.help,
        choices=choices,
        repeatable=param.multiple,
        subject=row.subject if row is not None and row.subject else OTHER,
        row=row,
    )


def _honoured(command: str, flags: tuple[Flag, ...]) -> Iterator[Flag]:
    """Yield the long flags of other programs that become flags of tk."""
    by_name = {name: flag for flag in flags for name in flag.names}
    for name, rule in rules_of(command).items():
        outcome = rule.outcomes.get("")
        if name.startswith("--") and name not in by_name and isinstance(outcome, Use):
            target = outcome.flags.split()[0]
            own = by_name.get(target.partition(".")[0])
            yield Flag(
                names=(name,),
                negations=(),
                value="VALUE" if rule.takes else "",
                help=f"Another name of {target}.",
                choices=own.choices if own is not None and rule.takes else (),
                repeatable=False,
                subject=OTHER,
                row=None,
            )


def _argument(param: Any, rows: dict[str, Option]) -> Argument:
    row = rows.get(param.name.removesuffix("_argument"))
    return Argument(
        value=param.metavar or param.name.upper(),
        help=row.help if row is not None else param.help,
        choices=_choices(param, row),
        required=param.required,
        repeatable=param.nargs == -1,
    )


def _choices(param: Any, row: Option | None) -> tuple[str, ...]:
    if row is not None:
        return tuple(str(choice) for choice in row.choices)
    return tuple(str(choice) for choice in param.type_descriptor.choices or ())
