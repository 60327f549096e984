"""Kernels compile for a GPU on machines without one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run(name: str, cache: Path) -> str:
    """Run a script of this folder with an empty cache of compiled kernels. Return its output."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    environment["TRITON_DISABLE_LINE_INFO"] = "1"  # is a tenth of the time
    script = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_kernels_compile_for_hopper(tmp_path):
    """The compiler refuses some programs that the interpreter runs.

    An example is a variable that changes its shape.
    """
    assert len(run("compiled.py", tmp_path).splitlines()) > 9


def test_parallel_compilation(tmp_path):
    """Each kernel is compiled once, on other threads. Errors are raised at the launch."""
    run("compiled_ahead.py", tmp_path)
