"""`tk rm`: remove models from the hub's cache, and from nowhere else."""

import dataclasses
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import CheckpointError, ConfigError, ModelNotFoundError, did_you_mean
from toolkit.gguf.names import choose, labels, models_in, split_name
from toolkit.hub import gguf_files, is_demo
from toolkit.inventory.console import print_note
from toolkit.inventory.find import cached_repos
from toolkit.units import size


def remove(names: list[str], *, yes: bool) -> int:
    """Remove models after a question. Return the exit code: 1 if the answer is no.

    Raises ModelNotFoundError for a model that is not in the cache, and ConfigError if stdin is not
    a terminal and `yes` is not set."""
    files = [one for name in names if (one := _gguf_model(name)) is not None]
    repos = _repos([name for name in names if split_name(name)[1] is None])
    total = sum(repo.size_on_disk for repo in repos) + sum(one.size for one in files)
    for repo in repos:
        print_note(f"{repo.repo_id}: {size(repo.size_on_disk)} in {repo.repo_path}")
    for one in files:
        print_note(f"{one.name}: {size(one.size)} in {one.repo_path}")
    if not yes and not _confirm(f"Remove {size(total)}?"):
        print_note("Nothing was removed.")
        return 1
    from huggingface_hub import scan_cache_dir

    for one in files:
        one.remove()
    # One repository at a time: a copy of a model has the same commit hashes.
    for repo in repos:
        alone = dataclasses.replace(scan_cache_dir(), repos=frozenset([repo]))
        alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    left = [str(repo.repo_path) for repo in repos if repo.repo_path.exists()]
    if left:
        raise ConfigError(
            f"{', '.join(left)} could not be removed. Check the owner and the permissions of the "
            f"files."
        )
    print_note(f"Removed {size(total)}.")
    return 0


@dataclass(frozen=True, slots=True)
class _GGUFModel:
    """The files of one GGUF model in the cache, in all revisions."""

    name: str
    repo_path: Path
    links: tuple[Path, ...]  # in snapshots
    blobs: tuple[Path, ...]  # what they link to
    is_last: bool  # the repository has no other GGUF model

    @property
    def size(self) -> int:
        return sum(blob.stat().st_size for blob in self.blobs)

    def remove(self) -> None:
        """Remove the files; of the last model in a repository, the whole entry of the cache."""
        if self.is_last:
            shutil.rmtree(self.repo_path)
            return
        for path in {*self.links, *self.blobs}:
            path.unlink(missing_ok=True)


def _gguf_model(name: str) -> _GGUFModel | None:
    """Find a GGUF model in the cache. Returns None for a name without quantization.

    Raises ModelNotFoundError if the cache does not have it."""
    repository, quantization = split_name(name)
    if quantization is None:
        return None
    repo = next((repo for repo in cached_repos() if repo.repo_id == repository), None)
    if repo is None:
        raise ModelNotFoundError(f"The cache has no model {name}.")
    _require_inside_cache(repo.repo_path)
    links: set[Path] = set()
    models: set[str] = set()
    for revision in repo.revisions:
        files = models_in(gguf_files(revision.snapshot_path))
        models |= files.keys()
        with suppress(CheckpointError):  # of a revision without it
            chosen = files[choose(files, quantization, repository)]
            links |= {revision.snapshot_path / file for file in chosen}
    links = {link for link in links if link.exists()}
    if not links:
        raise ModelNotFoundError(
            f"The cache has no model {name}. Of {repository} it has: "
            f"{', '.join(labels(models).values()) or 'no GGUF file'}."
        )
    blobs = tuple(sorted({link.resolve() for link in links}))
    return _GGUFModel(name, repo.repo_path, tuple(sorted(links)), blobs, len(models) == 1)


def _repos(names: list[str]) -> list[Any]:
    cached = {repo.repo_id: repo for repo in cached_repos()}
    for name in names:
        if name in cached:
            _require_inside_cache(cached[name].repo_path)
        elif is_demo(name):
            raise ConfigError(f"{name} comes with tk: there is nothing to remove.")
        elif Path(name).expanduser().exists():
            raise ConfigError(
                f"{name} is not in the hub's cache. tk rm removes only downloaded models."
            )
        else:
            raise ModelNotFoundError(f"The cache has no model {name}.{did_you_mean(name, cached)}")
    return [cached[name] for name in dict.fromkeys(names)]


def _require_inside_cache(path: Path) -> None:
    """Raise ConfigError for an entry that is a link out of the cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).resolve()
    if path.is_symlink() or path.resolve().parent != cache:
        raise ConfigError(
            f"{path} is a link out of the cache, to {path.resolve()}. Remove it by hand."
        )


def _confirm(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "tk rm asks before it removes anything, and stdin is not a terminal. Use --yes to "
            "remove without a question."
        )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
