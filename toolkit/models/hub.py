"""From a model's name to a folder with its files: a local folder, the hub's cache, or a download."""

from __future__ import annotations

import os
import re
from pathlib import Path

from toolkit.errors import CheckpointError, ModelNotFoundError, did_you_mean

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SMALL_FILES = ["*.json", "*.txt", "*.model", "*.jinja", "tokenizer*", "*.tiktoken"]


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
            raise CheckpointError(f"{folder} is not a model folder: it has no config.json (it has {found}).")
        return folder
    if folder.exists():
        raise CheckpointError(
            f"{folder} is a file; a model is a folder with config.json, weights and a tokenizer."
        )
    if not _HUB_NAME.fullmatch(model) or model.startswith("."):
        raise ModelNotFoundError(
            f"There is no folder {model}.{did_you_mean(folder.name, _siblings(folder.parent))}"
        )
    return _from_hub(model, revision)


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import constants, model_info, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = f" at revision {revision}" if revision else ""
    try:
        if constants.HF_HUB_OFFLINE:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        files = [sibling.rfilename for sibling in model_info(name, revision=revision).siblings or []]
        weights = "*.safetensors" if any(f.endswith(".safetensors") for f in files) else "*.bin"
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*_SMALL_FILES, weights]))
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
    except (OfflineModeIsEnabled, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        cached = _cached_snapshot(name, revision)
        if cached is not None:
            return cached
        reason = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else f"the hub did not answer: {_first_line(error)}"
        )
        raise ModelNotFoundError(
            f"There is no model {name}{at}: no folder of that name here ({Path.cwd()}), it is not in the cache "
            f"({constants.HF_HUB_CACHE}), and {reason}.{did_you_mean(name, local_names())}"
        ) from None


def _cached_snapshot(name: str, revision: str | None) -> Path | None:
    """The snapshot of an earlier download, when it has a config and weights."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError):
        return None
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    return folder if has_weights and (folder / "config.json").is_file() else None


def local_names() -> list[str]:
    """Models that are at hand: folders here with a config.json, and what the hub's cache holds."""
    names = [path.parent.name for path in Path.cwd().glob("*/config.json")]
    cache = Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    )
    names += [path.name.removeprefix("models--").replace("--", "/") for path in cache.glob("models--*")]
    return names


def _siblings(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__
