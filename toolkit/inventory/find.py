"""Find models: the demo model, folders, the hub's cache, and the hub."""

from collections.abc import Iterator
from dataclasses import dataclass
from os.path import abspath
from pathlib import Path
from typing import Any

from toolkit import hub
from toolkit.config.engine import DEMO
from toolkit.errors import CheckpointError
from toolkit.files import read_json
from toolkit.gguf.names import labels, models_in, split_name
from toolkit.hub.progress import without_bars
from toolkit.inventory.checkpoint import TYPES, Checkpoint, Tensor, read_folder
from toolkit.inventory.remote_gguf import read_remote
from toolkit.lora.files import CONFIG
from toolkit.models.config.overrides import add_quantization
from toolkit.models.config.wrapped import unnest


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine."""

    name: str
    path: Path
    size: int  # bytes on disk, all revisions
    checkpoint: Checkpoint | None
    problem: str | None = None  # reason why it cannot be read or run
    base: str | None = None  # model of which it is a LoRA adapter, or "?"


def local_models(folders: list[Path]) -> Iterator[LocalModel]:
    """Yield the demo model, models and adapters in `folders` and one level below, cached ones."""
    from toolkit.demo import MODEL_DIR

    yield _read(DEMO, Path(MODEL_DIR))
    found: set[str] = set()
    for folder in folders:
        files = [
            file
            for name in ("config.json", CONFIG, "*.gguf")
            for file in sorted((*folder.glob(name), *folder.glob(f"*/{name}")))
            if abspath(file) not in found  # in an earlier folder, such as the parent
        ]
        found |= {abspath(file) for file in files}
        for config in files:
            if config.name == "config.json":
                yield _read(str(config.parent), config.parent)
            elif config.name == CONFIG:
                yield _read_adapter(str(config.parent), config.parent)
        for name in models_in(str(file) for file in files if file.suffix == ".gguf"):
            yield _read(name, Path(name))
    for repo in cached_repos():
        newest = max(repo.revisions, key=lambda revision: revision.last_modified)
        for file, label in labels(models_in(hub.gguf_files(newest.snapshot_path))).items():
            yield _read(f"{repo.repo_id}:{label}", newest.snapshot_path / file)
        if (newest.snapshot_path / CONFIG).is_file():
            yield _read_adapter(repo.repo_id, newest.snapshot_path)
        if (newest.snapshot_path / "config.json").is_file():
            model = _read(repo.repo_id, newest.snapshot_path, repo.size_on_disk)
            # Without weights: only its description was fetched, by tk show.
            if model.checkpoint is None or model.checkpoint.has_weights:
                yield model


def cached_repos() -> list[Any]:
    """Return the models in the hub's cache (huggingface_hub's CachedRepoInfo), by name."""
    if not hub.cached_names():
        return []  # avoids importing the hub's library, a third of the command's time
    from huggingface_hub import scan_cache_dir

    repos = scan_cache_dir().repos
    return sorted(
        (repo for repo in repos if repo.repo_type == "model"), key=lambda repo: repo.repo_id
    )


def find_checkpoint(model: str | None, revision: str | None = None) -> Checkpoint:
    """Find a model by the name that `tk serve` takes. Downloads only its description.

    Raises ModelNotFoundError and CheckpointError as `hub.locate` does."""
    if model is None or hub.is_local(model):
        return read_folder(hub.locate(model), model or DEMO)
    snapshot = hub.cached_snapshot(model, revision, with_weights=True)
    if snapshot is not None:
        return read_folder(snapshot, model)
    try:
        return _on_hub(model, revision)
    except hub.HubUnreachableError as unreachable:
        raise hub.not_found(model, revision, unreachable) from None


def _on_hub(name: str, revision: str | None) -> Checkpoint:
    name, quantization = split_name(name)
    with hub.hub_errors(name, revision), without_bars():
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError

        api = HfApi()
        info = api.model_info(name, revision=revision, files_metadata=True)
        files = {file.rfilename: file.size or 0 for file in info.siblings or []}
        gguf = hub.choose_gguf(files, quantization, name)
        if gguf is not None:
            return read_remote(
                name, revision, f"{name}:{labels(models_in(files))[gguf]}", gguf, files
            )
        try:
            raw = read_json(Path(hf_hub_download(name, "config.json", revision=revision)))
        except EntryNotFoundError:
            raise CheckpointError(f"{name} has no config.json: tk cannot run this model.") from None

        def read(file: str) -> str:
            if file not in files:
                return ""
            with hub.hub_errors(name, revision), without_bars():
                return Path(hf_hub_download(name, file, revision=revision)).read_text(
                    errors="replace"
                )

        add_quantization(raw, read)
        raw = unnest(raw)
        try:
            headers = api.get_safetensors_metadata(name, revision=revision).files_metadata.values()
        except NotASafetensorsRepoError:
            headers = []
        tensors = tuple(
            Tensor(key, TYPES.get(tensor.dtype, tensor.dtype), tuple(tensor.shape))
            for header in headers
            for key, tensor in header.tensors.items()
        )

    return Checkpoint(name, raw, files, tensors, read=read)


def _read_adapter(name: str, folder: Path) -> LocalModel:
    size = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    base, problem = "?", None
    try:
        config = read_json(folder / CONFIG)
        base = str(config["base_model_name_or_path"] or "?")
    except (OSError, ValueError):
        problem = f"{CONFIG} cannot be read"
    except (TypeError, KeyError):
        problem = f"{CONFIG} does not name the base model"
    return LocalModel(name, folder, size, None, problem, base)


def _read(name: str, folder: Path, size: int | None = None) -> LocalModel:
    try:
        checkpoint = read_folder(folder, name)
    except CheckpointError as error:
        return LocalModel(name, folder, size or 0, None, error.message)
    return LocalModel(
        name, folder, size if size is not None else checkpoint.size, checkpoint, checkpoint.problem
    )
