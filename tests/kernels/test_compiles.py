"""Kernels compile for a GPU on machines without one."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import builds

HERE = Path(__file__).parent
KERNELS = HERE.parents[1] / "kernels"


def run(name: str, cache: Path) -> str:
    """Run a script of this folder with a cache of compiled kernels. Return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # is a tenth of the time
    environment["TRITON_STORE_BINARY_ONLY"] = "1"
    done = subprocess.run(
        [sys.executable, HERE / name],
        capture_output=True,
        text=True,
        env=environment,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_compile_for_hopper():
    """The compiler refuses some programs that the interpreter runs.

    An example is a variable that changes its shape. Equal sources are compiled once. Of others,
    Triton's own cache holds the kernels that did not change."""
    pytest.importorskip("triton")
    version = importlib.metadata.version("triton")
    sources = [*KERNELS.rglob("*.py"), HERE / "compiled.py"]
    cache = builds.CACHE / f"triton-{version}"

    def compile_all(folder: Path) -> None:
        (folder / "output.txt").write_text(run("compiled.py", cache))
        builds.remove_old(cache, 200)

    done = builds.build("hopper", sources, (version, sys.version), compile_all)
    assert len((done / "output.txt").read_text().splitlines()) > 50


def test_parallel_compilation(tmp_path):
    """Each kernel is compiled once, on other threads. Errors are raised at the launch."""
    run("compiled_ahead.py", tmp_path)
