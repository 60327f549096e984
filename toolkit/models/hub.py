"""From a model's name to a folder with its files: a local folder, the hub's cache, or a download."""

from __future__ import annotations

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
"""The first kind that a model has is fetched."""
_CARD = ("README.md", "LICENSE*")
_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors that are this machine's."""


def locate(model: str | None, revision: str | None = None) -> Path:
    """The folder of a model: `model` itself when it is one, else its snapshot in the hub's cache, downloaded
    if need be.

    None is the demo model. Raises ModelNotFoundError telling what was searched, CheckpointError for a folder
    that is no model.
    """
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
            f"{folder} is a file; a model is a folder with config.json, weights and a tokenizer."
        )
    return _from_hub(model, revision)


def locate_tokenizer(name: str) -> Path:
    """The folder of a tokenizer, which may hold nothing else. Raises as `locate` does."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any(folder.glob("token*")):
        return folder
    return locate(name) if folder.exists() else _from_hub(name, None, with_weights=False)


def is_path(name: str) -> bool:
    """Whether a name can only be a folder's: the hub has none like it."""
    return not _HUB_NAME.fullmatch(name) or name.startswith(".")


class HubSilentError(ModelNotFoundError):
    """The hub was not asked, or did not answer; the message says why."""


@contextmanager
def asking(name: str, revision: str | None) -> Iterator[None]:
    """Around calls to the hub about a model: raises HubSilentError when it could not be asked, ModelNotFoundError when it
    has no such model for us, and CheckpointError when the cache cannot be written.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if constants.HF_HUB_OFFLINE:
        raise HubSilentError("HF_HUB_OFFLINE is set")
    try:
        yield
    except ToolkitError:
        raise
    except GatedRepoError:
        raise ModelNotFoundError(
            f"{name} is a gated model: accept its terms on its hub page, then set HF_TOKEN to a token of yours."
        ) from None
    except RevisionNotFoundError:
        raise ModelNotFoundError(f"{name} has no revision {revision!r} on the hub.") from None
    except RepositoryNotFoundError:
        raise ModelNotFoundError(
            f"There is no model {name}: no folder of that name here ({Path.cwd()}), and the hub does not have it "
            f"(a private one needs HF_TOKEN).{did_you_mean(name, local_names())}"
        ) from None
    except Exception as error:  # the hub's own kinds, the HTTP library's, the disk's
        if getattr(error, "errno", None) in _DISK:
            raise CheckpointError(
                f"{name} cannot be kept in {constants.HF_HUB_CACHE}: {_first_line(error)}. HF_HOME names another place."
            ) from None
        raise HubSilentError(f"the hub did not answer: {_first_line(error)}") from None


def wanted_files(names: Iterable[str], *, with_weights: bool = True) -> list[str]:
    """The patterns of those of a model's files that are fetched, given the names of all."""
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
    """The folder of a model of the hub; what is not in the cache yet is fetched, from where it was interrupted. `with_card`:
    its description and license as well; `bar`: a class of tqdm's that shows how far it is. Raises as `asking` does.
    """
    with asking(name, revision):
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
    except HubSilentError as silent:
        cached = cached_snapshot(name, revision, with_weights=with_weights)
        if cached is not None:
            return cached
        raise nowhere(name, revision, silent) from None


def nowhere(name: str, revision: str | None, silent: HubSilentError) -> ModelNotFoundError:
    """What is to be said of a model that is not on this machine, while the hub is silent."""
    from huggingface_hub import constants

    at = f" at revision {revision}" if revision else ""
    return ModelNotFoundError(
        f"There is no model {name}{at}: no folder of that name here ({Path.cwd()}), it is not in the cache "
        f"({constants.HF_HUB_CACHE}), and {silent.message}.{did_you_mean(name, local_names())}"
    )


def cached_snapshot(name: str, revision: str | None, *, with_weights: bool) -> Path | None:
    """The snapshot of an earlier download, when all is there that we would have fetched of it."""
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
    """Models that are at hand: folders here with a config.json, and what the hub's cache holds."""
    return [path.parent.name for path in Path.cwd().glob("*/config.json")] + cached_names()


def cached_names() -> list[str]:
    """What the hub's cache holds, found without importing its library."""
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
