"""Where settings come from: a flag beats a TK_* variable, which beats the file, which beats the default.

The file is that of --config (TK_CONFIG), else tk.toml in the current folder, else the one in the user's folder. Its keys are
for every command that knows them; those of a section, [serve] or [bench.offline], for that command alone.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import Option
from toolkit.errors import ConfigError, did_you_mean

FILE_VARIABLE = "TK_CONFIG"

Command = tuple[str, ...]
"""The words of a command: ("bench", "offline")."""
Known = Mapping[Command, Collection[str]]
"""The names of each command's settings."""


@dataclass(frozen=True, slots=True)
class Given:
    """A setting that somebody gave, and where: a flag, a variable, or a file."""

    value: Any
    origin: str


def resolve(
    rows: list[Option],
    flags: Mapping[str, Any],
    command: Command = (),
    known: Known | None = None,
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Given]:
    """The settings of a command that were given, by name. `flags` holds None for those the command line left out; `file`
    is what --config names; `known` tells mistakes in the file from other commands' settings.

    Raises ConfigError for a variable or a file that cannot be read, and for a key or a section that no command knows.
    """
    environment = os.environ if environment is None else environment
    path = settings_file(file, environment)
    from_file = {} if path is None else read_file(path, rows, command, known or {})
    settings = {}
    for row in rows:
        if flags.get(row.name) is not None:
            settings[row.name] = Given(flags[row.name], row.flag)
        elif row.variable in environment:
            settings[row.name] = Given(
                row.parse(environment[row.variable], row.variable), row.variable
            )
        elif row.name in from_file:
            settings[row.name] = from_file[row.name]
    return settings


def settings_file(named: str | None, environment: Mapping[str, str]) -> Path | None:
    """The file that settings are read from, if there is one. Raises ConfigError when the one that was asked for is not."""
    wanted = named or environment.get(FILE_VARIABLE)
    if wanted:
        path = Path(wanted).expanduser()
        if not path.is_file():
            asked = "--config" if named else FILE_VARIABLE
            what = "that is no regular file" if path.exists() else "there is no such file"
            raise ConfigError(f"{asked} names {path}, and {what}.", param="config")
        return path
    places = [user_folder(environment) / "tk.toml"]
    with suppress(FileNotFoundError):  # the folder that this runs in may be gone
        places.insert(0, Path.cwd() / "tk.toml")
    return next((path for path in places if path.is_file()), None)


def user_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Where a user's own settings are: $XDG_CONFIG_HOME/tk, else ~/.config/tk."""
    base = (os.environ if environment is None else environment).get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "tk"


def read_file(path: Path, rows: list[Option], command: Command, known: Known) -> dict[str, Given]:
    """What a file says of a command's settings, those of the innermost section first. All of the file is checked.

    Raises ConfigError for a file that is no TOML, and for a key, a section or a value that cannot be.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    by_name = {row.name: row for row in rows}
    found: dict[str, Given] = {}
    for section, name, value in _entries(path, content, (), known or {command: list(by_name)}):
        if command[: len(section)] == section and name in by_name:
            origin = f"{path} [{'.'.join(section)}]" if section else str(path)
            found[name] = Given(by_name[name].check(value, f"{origin}: {name}"), origin)
    return found


def _entries(
    path: Path, table: Mapping[str, Any], section: Command, known: Known
) -> Iterator[tuple[Command, str, Any]]:
    """(section, setting, value) of a table and those in it, outer ones first. Raises ConfigError for what nobody knows."""
    here = f" in [{'.'.join(section)}]" if section else ""
    names = {
        name
        for command, those in known.items()
        if command[: len(section)] == section
        for name in those
    }
    sections = {command[len(section)] for command in known if command[:-1] == section and command}
    inner = []
    for key, value in table.items():
        name = key.replace("-", "_")
        if isinstance(value, dict) and key in sections:
            inner.append((key, value))
        elif isinstance(value, dict) and name not in names:
            nearest = did_you_mean(key, sections) or (
                f" There are: {', '.join(sorted(sections))}." if sections else ""
            )
            raise ConfigError(
                f"{path}: there is no section [{'.'.join((*section, key))}].{nearest}", param=key
            )
        elif name not in names:
            raise ConfigError(
                f"{path}: there is no setting {name!r}{here}.{did_you_mean(name, names)}",
                param=name,
            )
        else:
            yield section, name, value
    for key, value in inner:
        yield from _entries(path, value, (*section, key), known)
