"""Pictures in a folder of this machine, from which no path leads out."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import PurePath

from toolkit.errors import InvalidParamError
from toolkit.pictures.settings import PictureLimits

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # pipes would block


def read_below(path: str, limits: PictureLimits, param: str, count: Callable[[int], None]) -> bytes:
    """Return the bytes of a file below `local_folder`. `count` gets their number.

    No symbolic link below that folder is followed. Raises InvalidRequestError, and what `count`
    raises."""
    if not limits.local_folder:
        raise InvalidParamError(
            param, "is a file: URL, and this server reads none; send the picture in a data: URL"
        )
    parts = _parts_below(limits.local_folder, path)
    if not parts:
        raise InvalidParamError(param, "is a file: URL outside the folder that this server reads")
    try:
        descriptor = _open_below(limits.local_folder, parts)
    except OSError as error:
        raise InvalidParamError(
            param, f"is a file: URL that cannot be read: {os.strerror(error.errno or 0)}"
        ) from None
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidParamError(param, "is a file: URL of something that is not a regular file")
        count(min(found.st_size, limits.max_bytes))
        with open(descriptor, "rb", closefd=False) as file:
            data = file.read(limits.max_bytes + 1)
    finally:
        os.close(descriptor)
    if len(data) > limits.max_bytes:
        raise InvalidParamError(
            param,
            f"is a file of {found.st_size:,} bytes; at most {limits.max_bytes:,} are allowed",
        )
    return data


def _parts_below(folder: str, path: str) -> list[str]:
    """Return the names that lead from the folder to the path, none if it is outside."""
    parts = PurePath(path).parts
    if ".." in parts or "\0" in path:
        return []
    for root in (os.path.abspath(folder), os.path.realpath(folder)):
        above = PurePath(root).parts
        if parts[: len(above)] == above:
            return list(parts[len(above) :])
    return []


def _open_below(folder: str, parts: list[str]) -> int:
    """Open a file, one folder after the other. Raises OSError at a symbolic link."""
    *folders, name = parts
    here = os.open(folder, _FOLDER)
    try:
        for one in folders:
            below = os.open(one, _FOLDER | os.O_NOFOLLOW, dir_fd=here)
            os.close(here)
            here = below
        return os.open(name, _FILE | os.O_NOFOLLOW, dir_fd=here)
    finally:
        os.close(here)
