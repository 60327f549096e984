"""Installed plug-ins: the example, and packages made by hand."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from toolkit import plugins
from toolkit.models.config import registry

EXAMPLE = Path(__file__).parent / "example"


@pytest.fixture(scope="session")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example package. Return its folder, for PYTHONPATH."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    shutil.copytree(EXAMPLE, source, dirs_exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(target), str(source)], check=True)
    return target


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the plug-ins of this process before and after a test that changes them."""
    clear()
    yield
    monkeypatch.undo()
    clear()


def clear() -> None:
    for cached in (plugins.installed, registry._plugins, plugins._warn):
        cached.cache_clear()


@pytest.fixture
def install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget: None
) -> Callable[[str, dict[str, str]], Path]:
    """Install a package for this process: `install("name", {"group": "a = module:B"})`."""

    def make(name: str, points: dict[str, str]) -> Path:
        folder = tmp_path / "installed"
        info = folder / f"{name}-0.3.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.3\n")
        lines = [f"[{group}]\n{point}\n" for group, point in points.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(folder)
        return folder

    return make
