"""`tk rm`: remove models from the hub's cache, and from nowhere else."""

import dataclasses
import sys
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, ModelNotFoundError, did_you_mean
from toolkit.inventory.console import print_note
from toolkit.inventory.find import cached_repos
from toolkit.units import size


def remove(names: list[str], *, yes: bool) -> int:
    """Remove models after a question. Return the exit code: 1 if the answer is no.

    Raises ModelNotFoundError for a model that is not in the cache, and ConfigError if stdin is not
    a terminal and `yes` is not set."""
    repos = _repos(names)
    total = sum(repo.size_on_disk for repo in repos)
    for repo in repos:
        print_note(f"{repo.repo_id}: {size(repo.size_on_disk)} in {repo.repo_path}")
    if not yes and not _confirm(f"Remove {size(total)}?"):
        print_note("Nothing was removed.")
        return 1
    from huggingface_hub import scan_cache_dir

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


def _repos(names: list[str]) -> list[Any]:
    cached = {repo.repo_id: repo for repo in cached_repos()}
    for name in names:
        if name in cached:
            _require_inside_cache(cached[name].repo_path)
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
