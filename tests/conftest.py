"""Fixtures for the whole suite. Nothing here, or anywhere in the tests, reaches beyond this machine."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small random checkpoint, by its name in `checkpoints.ARCHITECTURES`; each is made once."""
    from tests import checkpoints

    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = checkpoints.save(checkpoints.make_reference(name), tmp_path_factory.mktemp(name))
        return made[name]

    return folder


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tests see no TK_* variable and no tk.toml of whoever runs them."""
    for name in list(os.environ):
        if name.startswith("TK_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
