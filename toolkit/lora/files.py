"""An adapter's files in PEFT's format."""

import hashlib
from pathlib import Path

from toolkit.errors import CheckpointError
from toolkit.sequence import Adapter

LEAST_MAX_RANK = 16  # that adapters may have without --max-lora-rank
CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_ADVICE = {
    CONFIG: "An adapter is a folder in PEFT's format",
    TENSORS: "Save it with safe_serialization=True",
}


def find_adapter(name: str, folder: Path) -> Adapter:
    """Return an adapter as it is on disk now. A changed file makes another revision.

    Raises CheckpointError if a file is missing."""
    digest = hashlib.sha256()
    for file in (CONFIG, TENSORS):
        try:
            found = (folder / file).stat()
        except OSError as error:
            missing = isinstance(error, FileNotFoundError | NotADirectoryError)
            why = f"there is no {file}. {_ADVICE[file]}" if missing else str(error)
            raise CheckpointError(f"adapter {name!r} ({folder}): {why}.") from None
        digest.update(f"{found.st_size} {found.st_mtime_ns}\n".encode())
    return Adapter(name, str(folder), digest.hexdigest()[:16])
