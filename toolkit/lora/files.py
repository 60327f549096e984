"""An adapter's files in PEFT's format."""

import hashlib
import os
import stat
from pathlib import Path

import numpy as np

from toolkit.errors import CheckpointError, ConfigError
from toolkit.files import open_file
from toolkit.sequence import Adapter

LEAST_MAX_RANK = 16  # that adapters may have without --max-lora-rank
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_ADVICE = {
    CONFIG: "An adapter is a folder in PEFT's format",
    TENSORS: "Save it with safe_serialization=True",
}


def require_lora_dir(path: str | None) -> None:
    """Raise ConfigError if --lora-dir is given and is not a folder."""
    if path is None or (folder := Path(path).expanduser()).is_dir():
        return
    problem = "it is not a folder" if folder.exists() else "there is no such folder"
    raise ConfigError(
        f"--lora-dir {path}: {problem}. Adapters are looked up in it, so it must exist at the "
        f"start; it may be empty.",
        param="lora_dir",
    )


def find_adapter(name: str, folder: Path) -> Adapter:
    """Return an adapter as it is on disk now. A changed file makes another revision.

    Raises CheckpointError if a file is missing."""
    # Times may be equal in all folders, for example in an image of a container.
    digest = hashlib.sha256(os.fsencode(os.path.realpath(folder)))
    for file in (CONFIG, TENSORS):
        try:
            found = (folder / file).stat()
        except OSError as error:
            if not isinstance(error, FileNotFoundError | NotADirectoryError):
                why = f"{file} cannot be read: {error.strerror}"
            elif not folder.is_dir():
                why = "it is not a folder" if folder.exists() else "there is no such folder"
            else:
                why = f"there is no {file}. {_ADVICE[file]}"
            raise CheckpointError(f"adapter {name!r} ({folder}): {why}.") from None
        if not stat.S_ISREG(found.st_mode):
            raise CheckpointError(f"adapter {name!r} ({folder}): {file} is not a regular file.")
        digest.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
    return Adapter(name, str(folder), digest.hexdigest()[:16])


def read_file(path: Path, most: int) -> memoryview:
    """Return the content of a regular file of at most `most` bytes. Raises OSError."""
    with open_file(path, most) as file:
        # Other threads run meanwhile, unlike during a bytearray's start, which fills it with zeros.
        content = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        return content[: file.readinto(content)]  # type: ignore[attr-defined]
