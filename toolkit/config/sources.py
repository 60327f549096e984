"""Sources of settings. Precedence: flag, TK_* variable, file, default.

The file is --config (TK_CONFIG), else tk.toml in the current folder, else the user's tk.toml. Its
top-level keys apply to all commands that have them. Keys in a section, such as [serve] or
[bench.offline], apply to that command only. Every command checks the complete file against the
settings of all commands, so that a misspelled key is an error everywhere."""

import os
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import Option
from toolkit.errors import ConfigError, did_you_mean
from toolkit.logs import DEBUG
from toolkit.running import UNLISTED

FILE_VARIABLE = "TK_CONFIG"
CHECK_MEMORY = "TK_CHECK_MEMORY"
"""1: an idle engine checks that no block is lost, and new blocks are full of NaN. For tests."""

CommandPath = tuple[str, ...]  # words of a command: ("bench", "offline")
Known = Mapping[CommandPath, Collection[str]]  # names of the settings of each command


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """Value of a setting, and its origin: a flag, a variable, or a file."""

    value: Any
    origin: str


def resolve(
    rows: list[Option],
    flags: Mapping[str, Any],
    command: CommandPath = (),
    known: Known | None = None,
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> dict[str, SourcedValue]:
    """Return the settings of a command that are set by a flag, a variable or the file, by name.

    `flags`: None for a flag not on the command line. `file`: value of --config. `known`: settings
    of all commands; other commands' keys in the file are no errors. Raises ConfigError for a
    variable or a file that cannot be read, and for an unknown key or section."""
    environment = os.environ if environment is None else environment
    path = settings_file(file, environment)
    from_file = {} if path is None else read_file(path, rows, command, known or {})
    settings = {}
    for row in rows:
        if flags.get(row.name) is not None:
            settings[row.name] = SourcedValue(flags[row.name], row.flag)
        elif row.variable in environment:
            settings[row.name] = SourcedValue(
                row.parse(environment[row.variable], row.variable), row.variable
            )
        elif row.name in from_file:
            settings[row.name] = from_file[row.name]
    return settings


def checks_memory() -> bool:
    return os.environ.get(CHECK_MEMORY, "") not in ("", "0")


def unknown_variables(names: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the TK_* variables that no setting reads, likely misspelled, with a suggestion each.

    `names`: of all settings."""
    internal = {FILE_VARIABLE, CHECK_MEMORY, DEBUG, UNLISTED}
    known = internal.union(f"TK_{name.upper()}" for name in names)
    unknown = sorted(name for name in environment if name.startswith("TK_") and name not in known)
    return {name: did_you_mean(name, known) for name in unknown}


def settings_file(named: str | None, environment: Mapping[str, str]) -> Path | None:
    """Return the settings file, or None. Raises ConfigError if a file that is named is missing."""
    wanted = environment.get(FILE_VARIABLE) if named is None else named
    if wanted is not None:  # an empty name is an error, too: the file may hold the keys
        path = Path(wanted).expanduser()
        if not path.is_file():
            source = "--config" if named is not None else FILE_VARIABLE
            problem = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"{source} names {path}, which {problem}.", param="config")
        return path
    places = [user_folder(environment) / "tk.toml"]
    with suppress(FileNotFoundError):  # the current folder may have been removed
        places.insert(0, Path.cwd() / "tk.toml")
    return next((path for path in places if path.is_file()), None)


def user_folder(environment: Mapping[str, str] | None = None) -> Path:
    """Return the user's settings folder: $XDG_CONFIG_HOME/tk, else ~/.config/tk."""
    base = (os.environ if environment is None else environment).get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "tk"


def read_file(
    path: Path, rows: list[Option], command: CommandPath, known: Known
) -> dict[str, SourcedValue]:
    """Return a command's settings in a file; inner sections win. The whole file is checked.

    Raises ConfigError for invalid TOML, and for an unknown key or section or an invalid value."""
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    by_name = {row.name: row for row in rows}
    found: dict[str, SourcedValue] = {}
    for section, name, value in _entries(path, content, (), known or {command: list(by_name)}):
        if command[: len(section)] == section and name in by_name:
            origin = f"{path} [{'.'.join(section)}]" if section else str(path)
            found[name] = SourcedValue(by_name[name].check(value, f"{origin}: {name}"), origin)
    return found


def _entries(
    path: Path, table: Mapping[str, Any], section: CommandPath, known: Known
) -> Iterator[tuple[CommandPath, str, Any]]:
    """Yield (section, setting, value) of a table, then of its sub-tables.

    Raises ConfigError for an unknown setting or section."""
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
            hint = did_you_mean(key, sections) or (
                f" Sections: {', '.join(sorted(sections))}." if sections else ""
            )
            raise ConfigError(
                f"{path}: unknown section [{'.'.join((*section, key))}].{hint}", param=key
            )
        elif name not in names:
            raise ConfigError(
                f"{path}: unknown setting {name!r}{here}.{did_you_mean(name, names)}", param=name
            )
        else:
            yield section, name, value
    for key, value in inner:
        yield from _entries(path, value, (*section, key), known)
