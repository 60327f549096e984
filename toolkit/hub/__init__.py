"""Find a model's files by its name: a local folder, the hub's cache, or a download."""

import errno
import fnmatch
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from toolkit.config.engine import DEMO
from toolkit.errors import CheckpointError, ModelNotFoundError, ToolkitError, did_you_mean
from toolkit.gguf.file import split_files, split_names
from toolkit.gguf.folder import is_gguf
from toolkit.gguf.names import choose, labels, models_in, split_name
from toolkit.units import size

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/([\w.-]+/[\w.-]+(?::[\w.-]+)?).*"
)
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.tiktoken"]
_WEIGHTS = ["*.safetensors", "*.bin"]
"""Formats of weights. The first that a model has is downloaded."""
_CARD = ("README.md", "LICENSE*")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


def locate(model: str | None, revision: str | None = None) -> Path:
    """Return a model's folder: `model` itself, or its snapshot in the hub's cache.

    A GGUF file, of a split model the first, stands for a folder. A missing snapshot is downloaded.
    None and "tk-demo" are the demo model. The path is absolute: the process may change its folder
    later. Raises ModelNotFoundError with the places searched, and CheckpointError for a folder that
    is not a model."""
    if model is None or is_demo(model):
        from toolkit.demo import MODEL_DIR

        return Path(MODEL_DIR)
    if not model:  # such as a variable of the shell without a value; Path("") is this folder
        raise ModelNotFoundError("The name of the model is empty.")
    folder = Path(model).expanduser()
    if folder.is_dir():
        names = [path.name for path in folder.iterdir()]
        file = choose_gguf(names, None, str(folder))
        if file is not None:
            return folder.absolute() / file
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise CheckpointError(
                    f"{folder} is a LoRA adapter. Serve its base model with it: tk serve BASE "
                    f"--lora-modules {folder.name}={folder}"
                )
            found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
            raise CheckpointError(
                f"{folder} is not a model folder: it has no config.json (it has {found})."
            )
        return folder.absolute()
    if is_gguf(folder):
        return split_files(folder)[0].absolute()
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file. A model is a folder with config.json, weights and a tokenizer, "
            f"or a GGUF file."
        )
    return _from_hub(model, revision)


def is_demo(name: str) -> bool:
    """Return True for the demo model's name, unless there is a folder of that name."""
    return name == DEMO and not Path(name).exists()


def locate_tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer, which may have no model. Raises as `locate` does."""
    folder = Path(name).expanduser()
    if folder.is_dir() and any(folder.glob("token*")):
        return folder.absolute()
    return locate(name) if folder.exists() else _from_hub(name, None, with_weights=False)


def local_tokenizer(name: str) -> Path | None:
    """Return the folder of a tokenizer on this machine, None for one that must be downloaded.

    Raises as `locate` does for a path."""
    if is_path(name) or Path(name).expanduser().exists():
        return locate_tokenizer(name)
    return cached_snapshot(name, None, with_weights=False)


def locate_adapter(name: str) -> Path:
    """Return the folder of a LoRA adapter, downloaded if it is missing.

    Raises ModelNotFoundError."""
    if is_path(name) or Path(name).expanduser().is_dir():
        return Path(name).expanduser()  # whoever reads it reports what is missing
    try:
        return fetch(name)
    except HubUnreachableError as unreachable:
        cached = local_adapter(name)
        if cached is not None:
            return cached
        raise not_found(name, None, unreachable) from None


def local_adapter(name: str) -> Path | None:
    """Return the folder of a LoRA adapter on this machine, None for one that must be downloaded.

    A path is returned even if there is nothing."""
    folder = Path(name).expanduser()
    if is_path(name) or folder.is_dir():
        return folder
    cached = cached_snapshot(name, None, with_weights=False)
    return cached if cached is not None and any(cached.glob("adapter_model.*")) else None


def require_on_hub(name: str) -> None:
    """Raise ModelNotFoundError if a model must be downloaded and cannot be."""
    try:
        with hub_errors(name, None):
            from huggingface_hub import model_info

            model_info(split_name(name)[0])
    except HubUnreachableError as unreachable:
        raise not_found(name, None, unreachable) from None


def is_local(name: str) -> bool:
    """Return True if a name is not looked up on the hub: the demo model's, or a path."""
    return is_demo(name) or Path(name).expanduser().exists() or is_path(name)


def is_path(name: str) -> bool:
    """Return True if a name can only be a path: of a GGUF file, or no valid name on the hub."""
    return not _HUB_NAME.fullmatch(name) or name.startswith(".") or _is_gguf_path(name)


def require_path(name: str) -> None:
    """Raise ModelNotFoundError if a name can only be a path, and there is nothing."""
    path = Path(name).expanduser()
    if path.exists() or not is_path(name):
        return
    kind = "file" if _is_gguf_path(name) else "folder"
    hint = address_hint(name) or did_you_mean(path.name, _siblings(path.parent))
    raise ModelNotFoundError(f"There is no {kind} {name}.{hint}")


def address_hint(name: str) -> str:
    """Return a sentence with the name of the model whose address on the hub was given, else ""."""
    found = _HUB_ADDRESS.fullmatch(name)
    return f" The name of that model on the hub is {found[1]}." if found else ""


def owner_hint(name: str) -> str:
    """Return a sentence about names on the hub, for a name without an owner, else ""."""
    return "" if "/" in name else " Names on the hub are OWNER/NAME."


def _is_gguf_path(name: str) -> bool:
    """Return True for a file name that ends with .gguf, in a folder that exists."""
    return name.lower().endswith(".gguf") and Path(name).expanduser().parent.is_dir()


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
            f"{owner_hint(name)}"
        ) from None
    except Exception as error:  # of the hub's library, the HTTP library, or the disk
        if getattr(error, "errno", None) in _DISK_ERRORS:
            raise CheckpointError(
                f"{name} cannot be stored in {constants.HF_HUB_CACHE}: {_first_line(error)}. Set "
                f"HF_HOME to store models elsewhere."
            ) from None
        raise HubUnreachableError(f"the hub did not answer: {_first_line(error)}") from None


def choose_gguf(names: Iterable[str], quantization: str | None, where: str) -> str | None:
    """Return the GGUF file to use of a model's files, of a split model the first; None: none.

    `where`: the model, for messages. Raises CheckpointError, with a list, if there are several, or
    none of that quantization."""
    names = list(names)
    has_others = any(fnmatch.filter(names, kind) for kind in _WEIGHTS)
    if quantization is None and (has_others or not models_in(names)):
        return None
    return choose(names, quantization, where)


def wanted_files(
    names: Iterable[str], *, with_weights: bool = True, gguf: str | None = None
) -> list[str]:
    """Return patterns of the files to download, given the names of all of a model's files.

    `gguf`: the result of `choose_gguf`."""
    if gguf is not None:
        return [escape(name) for name in split_names(gguf)]
    if not with_weights:
        return [*_SMALL_FILES]
    names = list(names)
    return [
        *_SMALL_FILES,
        next((kind for kind in _WEIGHTS if fnmatch.filter(names, kind)), _WEIGHTS[0]),
    ]


def download_missing(model: str | None, revision: str | None = None) -> None:
    """Download a model of the hub that is not on this machine. Ctrl-C ends the program at once.

    Raises as `locate` does, for a name that is no path."""
    if model is None or is_local(model):
        return
    if cached_snapshot(model, revision, with_weights=True) is None:
        from toolkit.hub.progress import exit_on_ctrl_c

        with exit_on_ctrl_c(model):
            _from_hub(model, revision)


def fetch(
    name: str,
    revision: str | None = None,
    *,
    with_weights: bool = True,
    with_card: bool = False,
) -> Path:
    """Download a model, show the progress, and return its folder, or its GGUF file.

    Cached files are kept, interrupted ones resumed. `with_card`: also README and license. Raises as
    `hub_errors` does, and CheckpointError as `choose_gguf` does, and if the disk is full."""
    name, quantization = split_name(name)
    with hub_errors(name, revision):
        from huggingface_hub import model_info, snapshot_download

        from toolkit.hub.progress import progress_bar

        info = model_info(name, revision=revision, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
        gguf = choose_gguf(sizes, quantization, name)
        wanted = wanted_files(sizes, with_weights=with_weights, gguf=gguf)
        missing = _missing_bytes(name, info.sha, sizes, wanted)
        _require_space(name, missing)
        wanted += _CARD if with_card else ()
        with progress_bar(name, missing) as bar:
            folder = Path(
                snapshot_download(name, revision=revision, allow_patterns=wanted, tqdm_class=bar)
            )
        return folder if gguf is None else folder / gguf


def _missing_bytes(
    name: str, commit: str | None, sizes: Mapping[str, int], patterns: Sequence[str]
) -> int:
    """Return the size of the files of these patterns that are not in the cache."""
    from huggingface_hub import try_to_load_from_cache

    return sum(
        num_bytes
        for file, num_bytes in sizes.items()
        if any(fnmatch.fnmatch(file, pattern) for pattern in patterns)
        and not isinstance(try_to_load_from_cache(name, file, revision=commit), str)
    )


def _require_space(name: str, num_bytes: int) -> None:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if num_bytes > free:
        raise CheckpointError(
            f"{name} needs {size(num_bytes)} more, and {size(free)} are free in {cache}. Free "
            f"space with tk rm, or set HF_HOME to store models elsewhere."
        )


def _from_hub(name: str, revision: str | None, *, with_weights: bool = True) -> Path:
    require_path(name)
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
        f"{did_you_mean(name, local_names())}{owner_hint(name)}"
    )


def cached_snapshot(name: str, revision: str | None, *, with_weights: bool) -> Path | None:
    """Return the snapshot of an earlier download, or the GGUF file in it, if complete, else None.

    Raises CheckpointError if there are several GGUF models and the name has no quantization."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    name, quantization = split_name(name)
    if quantization is not None:
        return _cached_gguf(name, revision, quantization)
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
    return _cached_gguf(name, revision, None)


def _cached_gguf(name: str, revision: str | None, quantization: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        # Without a pattern, the library looks for all files of the repository.
        folder = Path(
            snapshot_download(
                name, revision=revision, local_files_only=True, allow_patterns=["no file"]
            )
        )
    except LocalEntryNotFoundError:
        return None
    names = gguf_files(folder)
    complete = {file for files in models_in(names).values() if {*files} <= names for file in files}
    try:
        file = choose_gguf(complete, quantization, name)
    except CheckpointError:
        if quantization is None:
            raise
        return None  # the hub may have it
    return None if file is None else folder / file


def gguf_files(folder: Path) -> set[str]:
    """Return the GGUF files of a snapshot, also in folders, relative to it."""
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")}


def local_names() -> list[str]:
    """Return the names of models in the current folder, and of cached models."""
    here = Path.cwd()
    folders = [path.parent.name for path in here.glob("*/config.json")]
    return folders + list(models_in(path.name for path in here.glob("*.gguf"))) + cached_names()


def cached_names() -> list[str]:
    """Return the names of models in the hub's cache. Does not import the hub's library."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or base / "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    found = []
    for path in cache.glob("models--*"):
        name = path.name.removeprefix("models--").replace("--", "/")
        files = {file for folder in path.glob("snapshots/*") for file in gguf_files(folder)}
        found += [name, *(f"{name}:{label}" for label in labels(models_in(files)).values())]
    return found


def _siblings(folder: Path) -> list[str]:
    """Return the names of the folders and GGUF files in a folder."""
    if not folder.is_dir():
        return []
    return [path.name for path in folder.iterdir() if path.is_dir() or is_gguf(path)]


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
