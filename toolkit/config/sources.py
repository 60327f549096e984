"""Where settings come from: a flag beats a TK_* variable, which beats tk.toml, which beats the default."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.config.fields import Option
from toolkit.errors import ConfigError


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
    """The keys of `tk.toml` in the current folder (or `folder`), else in ~/.config/tk, that are among `rows`."""
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
    return {name: known[name].check(value) for name, value in settings.items() if name in known}
