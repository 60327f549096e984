"""Where settings come from: a flag beats a TK_* variable, which beats tk.toml, which beats the default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from toolkit.config.fields import Option, options
from toolkit.errors import ConfigError, did_you_mean


def resolve(
    rows: list[Option],
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> dict[str, Any]:
    """The settings that were given, by name. `flags` holds None for those the command line left out.

    Raises ConfigError for a variable or a key that cannot be read.
    """
    environment = os.environ if environment is None else environment
    from_file = read_file(rows, folder)
    settings = {}
    for row in rows:
        if flags.get(row.name) is not None:
            settings[row.name] = flags[row.name]
        elif row.variable in environment:
            settings[row.name] = row.parse(environment[row.variable], row.variable)
        elif row.name in from_file:
            settings[row.name] = from_file[row.name]
    return settings


def read_file(rows: list[Option], folder: Path | None = None) -> dict[str, Any]:
    """The keys of `tk.toml` in the current folder (or `folder`), else in ~/.config/tk, that are among `rows`.

    Other commands' keys are passed over; one that no command knows raises ConfigError.
    """
    for path in ((folder or Path.cwd()) / "tk.toml", Path.home() / ".config" / "tk" / "tk.toml"):
        if path.is_file():
            break
    else:
        return {}
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    known = {row.name: row for row in rows}
    settings = {key.replace("-", "_"): value for key, value in content.items()}
    every = known.keys() | {row.name for config in every_config() for row in options(config)}
    for name in settings:
        if name not in every:
            raise ConfigError(f"{path}: there is no setting {name!r}.{did_you_mean(name, every)}", param=name)
    return {name: known[name].check(value) for name, value in settings.items() if name in known}


def every_config() -> list[type]:
    """The classes that hold settings, of all commands."""
    from toolkit.config import bench, clients, engine, run, server

    modules = (bench, clients, engine, run, server)
    found = [value for module in modules for value in vars(module).values() if is_dataclass(value)]
    return [value for value in found if isinstance(value, type)]
