"""Describe a GGUF model on the hub from the headers of its files, which are fetched alone."""

import tempfile
from pathlib import Path, PurePosixPath

from toolkit.errors import CheckpointError
from toolkit.gguf.file import read_gguf, split_names
from toolkit.inventory.checkpoint import Checkpoint, gguf_checkpoint

FIRST = (
    2**22
)  # bytes fetched of a file at first; the vocabulary makes most headers larger than 1 MB
MOST = 2**28


def read_remote(
    repository: str, revision: str | None, name: str, first_file: str, sizes: dict[str, int]
) -> Checkpoint:
    """Describe a model by its first file. `sizes`: of all files of the repository, in bytes.

    Raises CheckpointError for a bad file, and the errors of the hub's library."""
    files = split_names(first_file)
    with tempfile.TemporaryDirectory() as folder:
        count = FIRST
        while True:
            for file in files:
                _fetch_begin(repository, revision, file, count, sizes.get(file, 0), Path(folder))
            try:
                model = read_gguf(Path(folder) / PurePosixPath(first_file).name)
            except CheckpointError:  # the end of a header is missing
                if count >= min(MOST, max(sizes.get(file, 0) for file in files)):
                    raise
                count *= 4
                continue
            return gguf_checkpoint(model, name, {file: sizes[file] for file in files}, None)


def _fetch_begin(
    repository: str, revision: str | None, file: str, count: int, size: int, folder: Path
) -> None:
    """Write a file's first bytes, and zeros up to its size, which take no space."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    headers = {**build_hf_headers(), "Range": f"bytes=0-{min(count, size) - 1}"}
    answer = get_session().get(
        hf_hub_url(repository, file, revision=revision), headers=headers, follow_redirects=True
    )
    hf_raise_for_status(answer)
    with (folder / PurePosixPath(file).name).open("wb") as stream:
        stream.write(answer.content[:count])
        stream.truncate(size)
