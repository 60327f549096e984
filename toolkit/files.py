"""Read the small files of models and adapters, which may be broken or hostile."""

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

MAX_BYTES = 64 * 2**20
"""Limit of a file of text. The index of a large model's weights has 15 MB."""


def open_file(path: Path, most: int = MAX_BYTES) -> BinaryIO:
    """Open a regular file of at most `most` bytes. Raises OSError."""
    # Without O_NONBLOCK, opening a pipe waits for its other end.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_size <= most:
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISREG(found.st_mode):
        raise OSError(f"it has {found.st_size} bytes, more than {most}")
    raise OSError("it is not a regular file")


def read_text(path: Path, most: int = MAX_BYTES, errors: str = "strict") -> str:
    """Return the text of such a file. Raises OSError and UnicodeDecodeError; `errors`: as open."""
    with open_file(path, most) as file:
        return file.read().decode(errors=errors)


def read_json(path: Path) -> Any:
    """Parse a JSON file. Raises OSError and ValueError."""
    return parse_json(read_text(path))


def parse_json(text: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, also for what is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def failure(error: OSError | UnicodeDecodeError) -> str:
    """Return why a file could not be read, without the number and the path."""
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"
