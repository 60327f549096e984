"""Find a model's files by its name: a local folder, the hub's cache, or a download."""

import errno
import fnmatch
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from toolkit.errors import CheckpointError, ModelNotFoundError, ToolkitError, did_you_mean

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.tiktoken"]
_WEIGHTS = ["*.safetensors", "*.bin"]
"""Formats of weights. The first that a model has is downloaded."""
_CARD = ("README.md", "LICENSE*")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def locate(model: str | None, revision: str | None = None) -> Path:
    """Return a model's folder: `model` itself, or its snapshot in the hub's cache.

    A missing snapshot is downloaded. None is the demo model. Raises ModelNotFoundError with the
    places searched, and CheckpointError for a folder that is not a model."""
    if model is None:
        from toolkit.demo import MODEL_DIR

        return Path(MODEL_DIR)
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise CheckpointError(
                f"{folder} is not a model folder: it has no config.json (it has {found})."
            )
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file. A model is a folder with config.json, weights and a tokenizer."
        )
    return _from_hub(model, revision)


def locate_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer, which may have no model. Raises as `locate` does."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any(folder.glob("token*")):
        return folder
    return locate(name) if folder.exists() else _from_hub(name, None, with_weights=False)


def is_path(name: str) -> bool:
    """Return whether a name can only be a path, since it is not a valid name on the hub."""
    return not _HUB_NAME.fullmatch(name) or name.startswith(".")


class HubUnreachableError(ModelNotFoundError):
    """The hub did not answer, or offline mode is on. The message gives the reason."""


@contextmanager
def hub_errors(name: str, revision: str | None) -> Iterator[None]:
    """Translate errors of calls to the hub about a model.

    Raises HubUnreachableError, ModelNotFoundError if the hub has no such model or denies access,
    and CheckpointError if the cache cannot be written."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise HubUnreachableError("HF_HUB_OFFLINE is set")
    try:
        yield
    except ToolkitError:
        raise
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{name} is a gated model: accept its terms on its hub page, then set HF_TOKEN to your "
            f"token."
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{name} has no revision {revision!r} on the hub.") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"There is no model {name}: no folder of that name in {Path.cwd()}, and none on the "
            f"hub (a private model needs HF_TOKEN).{did_you_mean(name, local_names())}"
        ) from None
    except Exception as error:  # of the hub's library, the HTTP library, or the disk
        if getattr(error, "errno", None) in _DISK_ERRORS:
            raise CheckpointError(
                f"{name} cannot be stored in {constants.HF_HUB_CACHE}: {_first_line(error)}. Set "
                f"HF_HOME to store models elsewhere."
            ) from None
        raise HubUnreachableError(f"the hub did not answer: {_first_line(error)}") from None


def wanted_files(names: Iterable[str], *, with_weights: bool = True) -> list[str]:
    """Return patterns of the files to download, given the names of all of a model's files."""
    if not with_weights:
        return _SMALL_FILES
    names = list(names)
    return [
        *_SMALL_FILES,
        next((kind for kind in _WEIGHTS if fnmatch.filter(names, kind)), _WEIGHTS[0]),
    ]


def fetch(
    name: str,
    revision: str | None = None,
    *,
    with_weights: bool = True,
    with_card: bool = False,
    bar: type | None = None,
) -> Path:
    """Download a model and return its folder. Cached files are kept, interrupted ones resumed.

    `with_card`: also README and license. `bar`: tqdm class that shows progress. Raises as
    `hub_errors` does."""
    with hub_errors(name, revision):
        from huggingface_hub import model_info, snapshot_download

        files = [
            sibling.rfilename for sibling in model_info(name, revision=revision).siblings or []
        ]
        wanted = [*wanted_files(files, with_weights=with_weights), *(_CARD if with_card else ())]
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=wanted, tqdm_class=bar)
        )


def _from_hub(name: str, revision: str | None, *, with_weights: bool = True) -> Path:
    if is_path(name):
        folder = Path(name).expanduser()
        raise ModelNotFoundError(
            f"There is no folder {name}.{did_you_mean(folder.name, _siblings(folder.parent))}"
        )
    try:
        return fetch(name, revision, with_weights=with_weights)
    except HubUnreachableError as unreachable:
        cached = cached_snapshot(name, revision, with_weights=with_weights)
        if cached is not None:
            return cached
        raise not_found(name, revision, unreachable) from None


def not_found(
    name: str, revision: str | None, unreachable: HubUnreachableError
) -> ModelNotFoundError:
    """Return the error for a model that is not on this machine while the hub is unreachable."""
    from huggingface_hub import constants

    at = f" at revision {revision}" if revision else ""
    return ModelNotFoundError(
        f"There is no model {name}{at}: no folder of that name in {Path.cwd()}, it is not in the "
        f"cache ({constants.HF_HUB_CACHE}), and {unreachable.message}."
        f"{did_you_mean(name, local_names())}"
    )


def cached_snapshot(name: str, revision: str | None, *, with_weights: bool) -> Path | None:
    """Return the snapshot of an earlier download if it is complete, else None."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    for kind in _WEIGHTS:
        wanted = [*_SMALL_FILES, kind] if with_weights else _SMALL_FILES
        try:
            found = snapshot_download(
                name, revision=revision, local_files_only=True, allow_patterns=wanted
            )
        except LocalEntryNotFoundError:
            continue
        folder = Path(found)
        if not with_weights or (any(folder.glob(kind)) and (folder / "config.json").is_file()):
            return folder
    return None


def local_names() -> list[str]:
    """Return the names of model folders in the current folder, and of cached models."""
    return [path.parent.name for path in Path.cwd().glob("*/config.json")] + cached_names()


def cached_names() -> list[str]:
    """Return the names of models in the hub's cache. Does not import the hub's library."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or base / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    return [
        path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*")
    ]


def _siblings(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
