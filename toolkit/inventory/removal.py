"""`tk rm`: models out of the hub's cache, and from nowhere else."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from toolkit.errors import ConfigError, ModelNotFoundError, did_you_mean
from toolkit.inventory.console import talk
from toolkit.inventory.find import cached
from toolkit.units import size


def remove(names: list[str], *, yes: bool) -> int:
    """Asks, and removes; the exit code of the command: 1 when the answer was no.

    Raises ModelNotFoundError for a name that is not in the cache, and ConfigError where nobody can be asked.
    """
    repos = _repos(names)
    total = sum(repo.size_on_disk for repo in repos)
    for repo in repos:
        talk(f"{repo.repo_id}: {size(repo.size_on_disk)} in {repo.repo_path}")
    if not yes and not _agrees(f"Remove {size(total)}?"):
        talk("Nothing was removed.")
        return 1
    from huggingface_hub import scan_cache_dir

    for (
        repo
    ) in repos:  # one at a time, with no other in sight: a copy of a model has the same commits
        alone = dataclasses.replace(scan_cache_dir(), repos=frozenset([repo]))
        alone.delete_revisions(*(revision.commit_hash for revision in repo.revisions)).execute()
    left = [str(repo.repo_path) for repo in repos if repo.repo_path.exists()]
    if left:
        raise ConfigError(
            f"{', '.join(left)} could not be removed: who owns the files, and who may write there?"
        )
    talk(f"Removed {size(total)}.")
    return 0


def _repos(names: list[str]) -> list[Any]:
    there = {repo.repo_id: repo for repo in cached()}
    for name in names:
        if name in there:
            _require_inside(there[name].repo_path)
        elif Path(name).expanduser().exists():
            raise ConfigError(
                f"{name} is a folder of yours: tk rm removes only what was downloaded from the hub."
            )
        else:
            raise ModelNotFoundError(f"The cache has no model {name}.{did_you_mean(name, there)}")
    return [there[name] for name in dict.fromkeys(names)]


def _require_inside(path: Path) -> None:
    """Raises ConfigError for an entry of the cache that leads elsewhere."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE).resolve()
    if path.is_symlink() or path.resolve().parent != cache:
        raise ConfigError(f"{path} leads out of the cache, to {path.resolve()}: remove it by hand.")


def _agrees(question: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(
            "tk rm asks before it removes anything, and nobody is there to answer: --yes removes without."
        )
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return sys.stdin.readline().strip().lower() in ("y", "yes")
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise
