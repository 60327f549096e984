"""Typer commands made from the table of settings."""

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from toolkit.cli.help import ALL, Command, CommandGroup, known_settings, path_of, show_all
from toolkit.config.fields import Option, Word, build, options
from toolkit.config.sources import SourcedValue, resolve, unknown_variables
from toolkit.errors import ConfigError

logger = logging.getLogger(__name__)


def command(app: typer.Typer, name: str, *configs: type) -> Callable[[Callable[..., None]], None]:
    """Register `function(*built_configs)` as a command whose flags are the configs' settings."""

    def register(function: Callable[..., None]) -> None:
        app.command(name, cls=Command)(_runner(function, configs))

    return register


def command_with_subcommands(
    app: typer.Typer, name: str, *configs: type
) -> Callable[[Callable[..., None]], typer.Typer]:
    """Register a command like `command`, and return a Typer app for its subcommands.

    The function runs if no subcommand is given. Subcommands have their own flags: a flag before a
    subcommand's name is an error."""

    def register(function: Callable[..., None]) -> typer.Typer:
        group = typer.Typer(cls=CommandGroup, rich_markup_mode=None)
        run = _runner(function, configs)
        rows = [row for config in configs for row in options(config)]

        def root(ctx: typer.Context, **flags: Any) -> None:
            given = [row.flag for row in rows if flags[row.name] is not None]
            given += ["--config"] * (flags["config"] is not None)
            if ctx.invoked_subcommand is not None and given:
                raise ConfigError(
                    f"{given[0]} is not allowed before '{ctx.invoked_subcommand}'. "
                    f"Flags of 'tk {name} {ctx.invoked_subcommand}' follow its name."
                )
            if ctx.invoked_subcommand is None:
                run(ctx, **flags)

        parameters = [*inspect.signature(run).parameters.values()]
        _set_signature(root, function, parameters, rows)
        group.callback(invoke_without_command=True)(root)
        app.add_typer(group, name=name)
        return group

    return register


def _runner(function: Callable[..., None], configs: Sequence[type]) -> Callable[..., None]:
    """Wrap `function` for Typer, which passes flags; None if one was not given."""
    rows = [row for config in configs for row in options(config)]

    def run(ctx: typer.Context, **flags: Any) -> None:
        root = ctx.find_root().command
        known = {name for names in known_settings(root).values() for name in names}
        for variable, hint in unknown_variables(known, os.environ).items():
            logger.warning("no setting reads the environment variable %s.%s", variable, hint)
        settings = given_settings(rows, flags, path_of(ctx), root)
        built: list[Any] = []
        for config in configs:
            names = {row.name for row in options(config)}
            built.append(build(config, {k: v.value for k, v in settings.items() if k in names}))
        function(*built)

    parameters = [parameter for row in rows for parameter in _parameters(row)]
    parameters.sort(key=lambda p: not p.name.endswith("_argument"))
    parameters = [_CONTEXT, *parameters, _SETTINGS_FILE, _HELP_ALL]
    _set_signature(run, function, parameters, rows)
    return run


def given_settings(
    rows: list[Option], flags: Mapping[str, Any], path: tuple[str, ...], root: Any
) -> dict[str, SourcedValue]:
    """Return the settings given by flag, variable or file, by name.

    `flags`: parsed by Typer. `path`: the words of the command. `root`: Typer's object of `tk`."""
    given = dict(flags)
    for row in rows:
        value = given.get(row.name)
        if row.type is tuple:  # Typer passes an empty list for a repeatable flag not given
            given[row.name] = [text for one in value or () for text in _texts(row, one)] or None
        elif row.type in (int, float, dict) and value is not None:
            given[row.name] = row.parse(value, row.flag)
    given |= _positional([row for row in rows if row.argument], given)
    return resolve(rows, given, path, known_settings(root), file=given.get("config"))


def _texts(row: Option, value: str) -> tuple[str, ...]:
    """Return the values of one use of a repeatable flag: itself, or those of a list in JSON."""
    if not value.lstrip().startswith("["):
        return (value,)
    texts: tuple[str, ...] = row.parse(value, row.flag)
    return texts


def _positional(rows: list[Option], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the positional arguments by setting. They fill settings without a flag, in order.

    A single argument with spaces is the prompt, if that has no flag and no such path exists. One
    without may be a `Word`. Raises ConfigError if arguments are left."""
    found = [given.get(f"{row.name}_argument") for row in rows]
    arguments = [None if value in ([], ()) else value for value in found]  # repeatable, not given
    values = [value for value in arguments if value is not None]
    names = [row.name for row in rows if given.get(row.name) is None]
    if len(values) > len(names):
        row, value = next(
            (row, value)
            for row, value in zip(rows, arguments, strict=True)
            if row.name not in names and value is not None
        )
        raise ConfigError(
            f"{row.metavar} is given twice: {row.flag} {_shown(row, given[row.name])} and "
            f"{_shown(row, value)}. Leave one out.",
            param=row.name,
        )
    if "prompt" in names and len(values) == 1:
        text = str(values[0])
        if len(text.split()) > 1 and not os.path.exists(os.path.expanduser(text)):
            names = ["prompt"]
        elif any(row.may_be_prompt and row.name == names[0] for row in rows):
            values = [Word(text)]
    return dict(zip(names, values, strict=False))


def _shown(row: Option, value: Any) -> str:
    shown = row.mask(value)
    return " ".join(shown) if isinstance(shown, tuple) else str(shown)


def _set_signature(
    run: Callable[..., None],
    function: Callable[..., None],
    parameters: list[inspect.Parameter],
    rows: list[Option],
) -> None:
    """Set the name, help and signature of `run`, which Typer reads, and the rows for the help."""
    run.__name__ = function.__name__
    run.__doc__ = function.__doc__
    # Typer reads __signature__, `help.settings_of` reads rows.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.rows = rows  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}


_CONTEXT = inspect.Parameter(
    "ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
)
_SETTINGS_FILE = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="FILE",
            help="Settings file to use instead of ./tk.toml and the user's tk.toml.",
        ),
    ],
)
_HELP_ALL = inspect.Parameter(
    "help_all",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[
        bool,
        typer.Option(ALL, is_eager=True, callback=show_all, help="Show every setting and exit."),
    ],
)


def _parameters(row: Option) -> list[inspect.Parameter]:
    """Make the Typer parameters of a setting: a flag, and an argument if it may be positional."""
    kind = inspect.Parameter.KEYWORD_ONLY
    flag = f"{row.flag}/--no-{row.flag[2:]}" if row.type is bool else row.flag
    flags = [flag, *row.aliases]
    metavar = row.metavar or ("|".join(str(c) for c in row.choices) or None)
    if row.type in (tuple, int, float):  # Typer would name the type that it parses
        metavar = row.metavar or {tuple: "<str>", int: "<int>", float: "<float>"}[row.type]
    kind_of_value: Any = {tuple: list[str], dict: str, int: str, float: str}.get(row.type, row.type)
    hint: Any = Annotated[
        kind_of_value | None,
        typer.Option(
            *flags, help=row.help + row.default_suffix, show_default=False, metavar=metavar
        ),
    ]
    made = [inspect.Parameter(row.name, kind, default=None, annotation=hint)]
    if row.argument:
        hint = Annotated[
            kind_of_value | None, typer.Argument(help=row.help, show_default=False, metavar=metavar)
        ]
        made.append(inspect.Parameter(f"{row.name}_argument", kind, default=None, annotation=hint))
    return made
