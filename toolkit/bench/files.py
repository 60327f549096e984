"""Files that a benchmark writes."""

from __future__ import annotations

from pathlib import Path

from toolkit.errors import ConfigError


def check_writable(path: Path, setting: str) -> None:
    """Raises ConfigError, which names the setting, when nothing can be written there."""
    try:
        path.open("ab").close()
    except OSError as error:
        raise ConfigError(
            f"--{setting.replace('_', '-')} cannot write {path}: {error.strerror}.", param=setting
        ) from None
